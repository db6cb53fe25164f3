"""Counter-based randomness: noise belongs to a sample's name, not to the batch that it is drawn in."""

import torch

from flowrl.mdp.seeds import derive_seed, generator, standard_noise

CPU = torch.device("cpu")


def test_seeds_are_stable_over_time():
    assert derive_seed(7, "noise", 3) == 892210993016186431
    assert derive_seed() == 6510301506637419378


def test_seeds_differ_by_type_position_and_value():
    names = [(1, "a"), ("1", "a"), ("a", 1), (1, "a", 0), ("1a",), (1, "b"), (2, "a"), (-1, "a")]
    names += [("ab", "c"), ("a", "bc"), ("abc",), ()]
    assert len({derive_seed(*name) for name in names}) == len(names)


def test_seeds_fill_63_bits_and_do_not_collide():
    seeds = [derive_seed(0, "noise", index) for index in range(20_000)]
    assert len(set(seeds)) == len(seeds) and 0 <= min(seeds) and (1 << 62) < max(seeds) < (1 << 63)


def test_generators_of_one_name_repeat():
    first, second, other = generator(1, "x"), generator(1, "x"), generator(2, "x")
    values = [torch.rand(4, generator=source) for source in (first, second, other)]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


def test_noise_of_a_row_does_not_depend_on_its_batch():
    seeds = [11, 12, 13, 14]
    batch = standard_noise(seeds, 2, (3, 4), CPU)
    assert batch.shape == (4, 3, 4) and batch.dtype == torch.float32
    for row, seed in enumerate(seeds):
        assert torch.equal(standard_noise([seed], 2, (3, 4), CPU)[0], batch[row])
    assert torch.equal(standard_noise(seeds[::-1], 2, (3, 4), CPU), batch.flip(0))


def test_g28_members_and_steps_have_noises_of_their_own():
    seeds = [derive_seed(0, "noise", 0, 5, member) for member in range(8)]
    noises = torch.stack([standard_noise(seeds, step, (4096,), CPU) for step in range(3)]).flatten(0, 1)
    correlation = torch.corrcoef(noises)
    off_diagonal = correlation - torch.eye(24)
    assert float(off_diagonal.abs().max()) < 5 / 4096**0.5
    assert abs(float(noises.mean())) < 0.02 and abs(float(noises.std()) - 1) < 0.02
