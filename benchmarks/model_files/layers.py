"""Small modules of PyTorch, each for a kind of layer that exporters write in their own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from model_files.recipe import Recipe
from model_files.torch_export import NEWER, OLDER, Exported, integers, normal

FAMILY = "layers"


def recipes() -> list[Recipe]:
    return [recipe for name, exported in _NETS.items() for recipe in exported.recipes(FAMILY, name)]


def _images(module: Callable[[], Any], *shapes: tuple[int, ...], **options: Any) -> Exported:
    """A module of images whose number, height and width may differ."""
    return Exported(
        module,
        lambda: [{"image": normal(*shape)} for shape in shapes],
        dynamic={"image": (0, 2, 3)},
        **options,
    )


def _sequences(module: Callable[[], Any], width: int, **options: Any) -> Exported:
    """A module of sequences whose number and length may differ."""
    shapes = ((2, 7, width), (1, 7, width), (3, 11, width))
    return Exported(
        module, lambda: [{"sequence": normal(*shape)} for shape in shapes], dynamic={"sequence": (0, 1)}, **options
    )


def _perceptron() -> Any:
    return nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10), nn.LogSoftmax(-1))


def _convolutions() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=4),
        nn.GroupNorm(4, 16),
        nn.Hardswish(),
        nn.AvgPool2d(2, count_include_pad=False),
        nn.Conv2d(16, 32, 1),
        nn.InstanceNorm2d(32, affine=True),
        nn.PReLU(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class _UNet(nn.Module):  # type: ignore[misc, unused-ignore]
    """Down and up again, by interpolation and by transposed convolution, with skip connections."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), nn.Conv2d(24, 4, 1)

    def forward(self, x: Any) -> Any:
        wide = functional.relu(self.first(x))
        deep = functional.elu(self.second(wide))
        stretched = functional.interpolate(deep, size=wide.shape[-2:], mode=self.mode)
        raised = functional.interpolate(self.up(deep), size=wide.shape[-2:], mode="nearest")
        return self.last(torch.cat([stretched, raised], 1)) + 1


class _Indexing(nn.Module):  # type: ignore[misc, unused-ignore]
    """Slices, masks, scatter and gather, as post-processing writes them."""

    def forward(self, x: Any) -> Any:
        scores, order = torch.topk(x, 3, dim=-1)
        picked = torch.gather(x, 1, order.clamp(max=x.shape[1] - 1))
        filled = x.masked_fill(x < 0, -1.0).cumsum(1)
        put = torch.zeros_like(x).scatter(2, order, scores)
        patched = x.clone()
        patched[:, 1:3, ::2] = 2.0
        return scores, picked, filled, put, patched, x[:, -1], x.flip(1), x.roll(1, 2), torch.tril(x), x.argmax(-1)


class _Selected(nn.Module):  # type: ignore[misc, unused-ignore]
    """Outputs whose sizes depend on values."""

    def forward(self, x: Any) -> Any:
        return x[x > 0], torch.nonzero(x > 1)


class _Recurrent(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer = kind(12, 16, batch_first=True, **options)

    def forward(self, x: Any) -> Any:
        found, state = self.layer(x)
        return (found, *state) if isinstance(state, tuple) else (found, state)


class _Attention(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        torch.backends.mha.set_fastpath_enabled(False)  # one operator of PyTorch's own, which nothing exports
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Any) -> Any:
        hidden = self.embedding(tokens) + torch.arange(tokens.shape[1]).unsqueeze(-1) / 10
        return self.encoder(hidden)


class _Causal(nn.Module):  # type: ignore[misc, unused-ignore]
    """Scaled dot-product attention, with a causal mask and by einsum."""

    def forward(self, x: Any) -> Any:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        products = torch.einsum("bhid,bhjd->bhij", heads, heads)
        return attended.transpose(1, 2).flatten(2), products


class _Sampled(nn.Module):  # type: ignore[misc, unused-ignore]
    def forward(self, x: Any) -> Any:
        turn = torch.tensor([[[0.8, -0.3, 0.1], [0.3, 0.9, -0.2]]]).expand(x.shape[0], -1, -1)
        grid = functional.affine_grid(turn, list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, align_corners=False)


class _Mathematics(nn.Module):  # type: ignore[misc, unused-ignore]
    """Functions of one number, norms and reductions."""

    def forward(self, x: Any) -> Any:
        small = torch.tanh(x) * 0.9
        functions = (torch.asin, torch.acos, torch.atan, torch.tan, torch.erf, torch.log1p)
        every = sum(function(small) for function in functions)
        activated = functional.mish(x) + functional.softplus(x) + functional.gelu(x, approximate="tanh")
        more = functional.hardtanh(x) + functional.celu(x) + functional.selu(x) + functional.softsign(x)
        reduced = x.std(-1) + x.var(1, keepdim=True).mean(-1) + x.norm(dim=-1) + torch.logsumexp(x, -1)
        whole = (x.round() + x.floor() + torch.remainder(x, 2) + torch.fmod(x, 2) + x.sign()).clamp(-5, 5)
        return every, activated, more, reduced, whole, functional.normalize(x, dim=-1), x.amax((1, 2)), x.prod(-1)


class _Spectrum(nn.Module):  # type: ignore[misc, unused-ignore]
    """The magnitudes of a short-time Fourier transform, framed by hand, as portable front ends do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))

    def forward(self, wave: Any) -> Any:
        frames = functional.pad(wave.unsqueeze(1), (32, 32), mode="reflect").squeeze(1).unfold(-1, 64, 16)
        found = torch.view_as_real(torch.fft.rfft(frames * self.window))
        return torch.log(found.square().sum(-1) + 1e-6)


class _Shuffled(nn.Module):  # type: ignore[misc, unused-ignore]
    def forward(self, x: Any) -> Any:
        padded = functional.pad(x, (1, 2, 0, 1), mode="replicate")
        return functional.pixel_shuffle(x, 2), functional.pixel_unshuffle(x, 2), functional.unfold(padded, 3), padded


def _steps(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """A loop and a branch that depend on values."""
    total = torch.zeros_like(x)
    for step in range(int(count)):
        if float(total.sum()) > 3.0:
            total = total - x * step
            total = total * 0.5
        else:
            total = total + x
    return total


def _loop() -> Exported:
    scripted: Any = torch.jit.script(_steps)
    return Exported(
        nn.Identity,
        lambda: [{"x": normal(3, 4).abs(), "count": torch.tensor(number)} for number in (4, 0, 7)],
        call=lambda _module, x, count: scripted(x, count),
        dynamic={"x": (0,)},
        exporters=(OLDER,),
    )


def _tokens() -> list[Mapping[str, Any]]:
    return [{"tokens": integers(50, *shape)} for shape in ((2, 6), (1, 6), (3, 9))]


_NETS: dict[str, Exported] = {
    "perceptron": Exported(_perceptron, lambda: [{"x": normal(rows, 20)} for rows in (2, 1, 5)], dynamic={"x": (0,)}),
    "convolutions": _images(_convolutions, (2, 3, 32, 32), (1, 3, 32, 32), (3, 3, 40, 24)),
    "unet_bilinear": _images(partial(_UNet, "bilinear"), (1, 3, 32, 32), (2, 3, 20, 36)),
    "unet_bicubic": _images(partial(_UNet, "bicubic"), (1, 3, 32, 32), (2, 3, 20, 36)),
    "grid_sample": _images(_Sampled, (2, 3, 12, 10), (3, 3, 9, 14), opset=20),
    "shuffled": _images(_Shuffled, (2, 4, 8, 6), (3, 4, 10, 4)),
    "indexing": _sequences(_Indexing, 8),
    "selected": _sequences(_Selected, 8),
    "mathematics": _sequences(_Mathematics, 8),
    "causal": _sequences(_Causal, 16),
    "lstm": _sequences(partial(_Recurrent, nn.LSTM, num_layers=2, bidirectional=True), 12),
    "gru": _sequences(partial(_Recurrent, nn.GRU, bidirectional=True), 12),
    "rnn": _sequences(partial(_Recurrent, nn.RNN, num_layers=2), 12),
    "transformer": Exported(_Attention, _tokens, dynamic={"tokens": (0, 1)}),
    "spectrum": Exported(
        _Spectrum,
        lambda: [{"wave": normal(*shape)} for shape in ((2, 400), (1, 555))],
        dynamic={"wave": (0, 1)},
        exporters=(NEWER,),
    ),
    "loop": _loop(),
}
