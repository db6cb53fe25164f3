"""The MDP: transitions, the scheduler seam, trajectories and the policy."""
