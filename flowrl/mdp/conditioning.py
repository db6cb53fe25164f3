"""Conditioning: prompt embeddings made once per prompt, and CFG whose unconditional half has no gradient.

Both work without a table of models. `PromptCache` memoises ``pipe.encode_prompt`` prompt by prompt.
`ConditionalGradient` tells the conditional forward from the unconditional one by the embeddings that
``encode_prompt`` returned first (every diffusers pipeline gives the positive ones first), watching the
first call of the pipeline once.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import UserError

STATES = ("hidden_states", "sample", "input_ids")  # names of what a network's states are passed as
MAX_CACHED_BYTES = 2 << 30  # SD3 and FLUX need about 5 MB a prompt, on the device of the text encoder
CANNOT_TELL = (
    "sampler.cfg_gradient: conditional cannot tell the conditional from the unconditional rows in this "
    "pipeline; use cfg_gradient: both"
)


class PromptCache:
    """Memoises ``encode_prompt``: every prompt is encoded once, alone, and rows are put together.

    Pipelines that pad a batch to its longest prompt give rows of different shapes; for those, whole calls
    are memoised instead. Beyond `MAX_CACHED_BYTES` those embeddings go that were not used for longest.

    Attributes:
        encoder_calls: how often the pipeline's own ``encode_prompt`` ran.
        positive: the first embeddings that the current pipeline call received (None before).
    """

    def __init__(self, encode_prompt: Callable[..., Any]) -> None:
        """``encode_prompt``: the pipeline's bound method."""
        self._encode = encode_prompt
        self._signature = inspect.signature(encode_prompt)
        self._cache: OrderedDict[str, Any] = OrderedDict()
        self._bytes = 0
        self.encoder_calls = 0
        self.positive: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The embeddings of a batch of prompts, as the pipeline's ``encode_prompt`` gives them."""
        bound = self._signature.bind(*args, **kwargs)
        result = self._lookup(dict(bound.arguments))
        if self.positive is None:
            self.positive = result[0] if isinstance(result, tuple) else result
        return result

    def _lookup(self, arguments: dict[str, Any]) -> Any:
        arguments.update(arguments.pop("kwargs", {}))
        if any(_holds_tensor(value) for value in arguments.values()):
            return self._call(arguments)
        prompt = arguments.get("prompt")
        if not isinstance(prompt, list):
            return self._remember(arguments)
        rows = [self._remember(_row(arguments, i, len(prompt))) for i in range(len(prompt))]
        try:
            return _stack(rows)
        except _DifferentShapesError:
            return self._remember(arguments)

    def _remember(self, arguments: dict[str, Any]) -> Any:
        key = repr(sorted(arguments.items()))
        if key not in self._cache:
            self._cache[key] = self._call(arguments)
            self._bytes += _bytes(self._cache[key])
            while self._bytes > MAX_CACHED_BYTES and len(self._cache) > 1:
                self._bytes -= _bytes(self._cache.popitem(last=False)[1])
        self._cache.move_to_end(key)
        return self._cache[key]

    def _call(self, arguments: dict[str, Any]) -> Any:
        self.encoder_calls += 1
        with torch.no_grad():
            return self._encode(**arguments)


class ConditionalGradient:
    """Runs the unconditional forward of CFG without gradient, in either of its two forms.

    A pipeline that batches CFG calls the network once with 2B rows: the call is split into two of B. A
    pipeline that calls twice has its unconditional call wrapped in ``no_grad``. Which is which is found in
    the first pipeline call by comparing embeddings, then remembered by position within a sampler step.
    """

    def __init__(self) -> None:
        """Nothing is known before the first call."""
        self._layout: dict[tuple[int, int], str] = {}
        self._position = 0
        self._conditional = False
        self.cache: PromptCache | None = None
        self.rows = 0

    def next_step(self) -> None:
        """To be told after every sampler step."""
        if self._position and not self._conditional:
            raise UserError(CANNOT_TELL)
        self._position, self._conditional = 0, False

    @contextmanager
    def installed(self, networks: dict[str, nn.Module]) -> Iterator[None]:
        """Puts the split in front of the networks' ``forward`` for the duration of a pipeline call."""
        self._position, self._conditional = 0, False
        before = {name: network.__dict__.get("forward") for name, network in networks.items()}
        try:
            for network in networks.values():
                network.__dict__["forward"] = self._wrap(network.forward)
            yield
        finally:
            for name, network in networks.items():
                network.__dict__.pop("forward", None)
                if before[name] is not None:
                    network.__dict__["forward"] = before[name]

    def _wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def split_forward(*args: Any, **kwargs: Any) -> Any:
            rows = rows_of_call(args, kwargs)
            place = (self._position, rows // self.rows)
            if place not in self._layout:
                self._layout[place] = self._recognise((*args, *kwargs.values()), rows)
            kind = self._layout[place]
            self._position += 1
            self._conditional |= kind != "unconditional"
            if kind == "conditional":
                return forward(*args, **kwargs)
            if kind == "unconditional":
                with torch.no_grad():
                    return forward(*args, **kwargs)
            outputs = []
            for half in (0, 1):
                some_args, some_kwargs = _half((args, kwargs), half, rows)
                with torch.set_grad_enabled(torch.is_grad_enabled() and kind == f"conditional_{half}"):
                    outputs.append(forward(*some_args, **some_kwargs))
            return _join(outputs[0], outputs[1])

        return split_forward

    def _recognise(self, given: tuple[Any, ...], rows: int) -> str:
        positive = self.cache.positive if self.cache is not None else None
        if rows == self.rows:
            if not any(_same(value, positive) for value in given):
                return "unconditional"
            if not self._conditional:
                return "conditional"
        elif rows == 2 * self.rows:
            batched = [value for value in given if _rows(value) == rows]
            halves = [h for h in (0, 1) if any(_same(_half(v, h, rows), positive) for v in batched)]
            if len(halves) == 1:
                return f"conditional_{halves[0]}"
        raise UserError(CANNOT_TELL)


class _DifferentShapesError(Exception):
    """Rows that cannot be stacked."""


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, Tensor)


def _bytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _row(arguments: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    """The arguments of one prompt alone; only prompt-like arguments are per row."""
    return {
        name: [value[index]]
        if "prompt" in name and isinstance(value, list) and len(value) == count
        else value
        for name, value in arguments.items()
    }


def _stack(rows: list[Any]) -> Any:
    first = rows[0]
    if isinstance(first, tuple):
        return tuple(_stack([row[i] for row in rows]) for i in range(len(first)))
    if isinstance(first, list):
        return [item for row in rows for item in row]
    if isinstance(first, Tensor):
        if any(row.shape != first.shape for row in rows):
            raise _DifferentShapesError
        if first.shape[0] == 1:
            return torch.cat(rows)
        return first  # position ids and the like have no batch dimension
    return first


def rows_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The rows of a network's call: those of its states."""
    states = states_of_call(args, kwargs)
    return len(states) if states is not None else 0


def states_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The states of a network's call, which come first or by name; None without either."""
    return args[0] if args else next((kwargs[name] for name in STATES if name in kwargs), None)


def _rows(value: Any) -> int:
    if isinstance(value, Tensor) and value.ndim >= 2:
        return value.shape[0]
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return len(value)
    return -1


def _same(value: Any, positive: Any) -> bool:
    if isinstance(value, list) and isinstance(positive, list):
        return len(value) == len(positive) and all(map(_same, value, positive))
    if isinstance(value, Tensor) and isinstance(positive, Tensor):
        return value.shape == positive.shape and torch.equal(value, positive.to(value.device, value.dtype))
    return False


def _half(value: Any, half: int, rows: int) -> Any:
    """The first or second half of everything that has `rows` rows."""
    if isinstance(value, Tensor):
        return (
            value.narrow(0, half * rows // 2, rows // 2) if value.ndim and value.shape[0] == rows else value
        )
    if isinstance(value, list) and len(value) == rows:
        return value[half * rows // 2 : (half + 1) * rows // 2]
    if isinstance(value, list | tuple):
        return type(value)(_half(item, half, rows) for item in value)
    if isinstance(value, dict):
        return {key: _half(item, half, rows) for key, item in value.items()}
    return value


def _join(first: Any, second: Any) -> Any:
    if isinstance(first, Tensor):
        return torch.cat([first, second])
    if isinstance(first, list):
        return first + second
    if isinstance(first, tuple):
        return tuple(map(_join, first, second))
    if isinstance(first, dict):  # ModelOutput
        return type(first)(**{key: _join(first[key], second[key]) for key in first})
    return first
