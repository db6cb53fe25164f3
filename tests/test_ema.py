"""The average of the trained weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flowrl.config import EmaConfig
from flowrl.mdp.ema import Ema


def weights(value: float = 0.0, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {
        "a": nn.Parameter(torch.full((2, 2), value, dtype=dtype)),
        "b": nn.Parameter(torch.full((3,), value, dtype=dtype)),
    }


def test_g17_one_update_per_optimizer_step() -> None:
    parameters = weights()
    ema = Ema(parameters, EmaConfig(decay=0.9, warmup=False))
    for step in range(1, 5):
        for p in parameters.values():
            p.data.fill_(step)
        ema.update()
    assert ema.updates == 4
    for average in ema.shadow.values():
        torch.testing.assert_close(average, torch.full_like(average, 0.9049))


def test_warm_up_follows_its_formula_up_to_the_decay() -> None:
    ema = Ema(weights(), EmaConfig(decay=0.3, warmup=True))
    decays = []
    for _ in range(5):
        decays.append(ema.decay())
        ema.update()
    assert decays == pytest.approx([1 / 10, 2 / 11, 3 / 12, 4 / 13 if 4 / 13 < 0.3 else 0.3, 0.3])


def test_the_average_is_float32_and_a_copy() -> None:
    parameters = weights(1.0, torch.bfloat16)
    ema = Ema(parameters, EmaConfig(decay=0.999, warmup=False))
    with torch.no_grad():
        parameters["a"].add_(1.0)
    ema.update()
    assert ema.shadow["a"].dtype == torch.float32
    torch.testing.assert_close(ema.shadow["a"], torch.full((2, 2), 1.001))
    with ema.lend():
        assert parameters["a"].dtype == torch.bfloat16
    assert parameters["a"][0, 0] == 2.0


def test_g16_weights_come_back_on_every_exit_and_the_context_does_not_nest() -> None:
    parameters = weights(1.0)
    ema = Ema(parameters, EmaConfig(decay=0.5))
    with torch.no_grad():
        parameters["a"].add_(1.0)
    own = {name: p.data_ptr() for name, p in parameters.items()}
    with pytest.raises(ZeroDivisionError), ema.lend():
        assert ema.lent and torch.equal(parameters["a"], torch.ones(2, 2))
        assert not torch.is_grad_enabled()
        with pytest.raises(RuntimeError, match="nest"), ema.lend():
            pass
        with pytest.raises(RuntimeError, match="holds it"):
            ema.update()
        raise ZeroDivisionError
    assert not ema.lent and torch.is_grad_enabled()
    assert own == {name: p.data_ptr() for name, p in parameters.items()}
    assert torch.equal(parameters["a"], torch.full((2, 2), 2.0))
    with ema.lend():
        pass


def test_no_average_without_a_decay() -> None:
    with pytest.raises(ValueError, match=r"ema\.decay"):
        Ema(weights(), EmaConfig(decay=0.0))
