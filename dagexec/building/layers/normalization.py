"""Normalization and dropout."""

from __future__ import annotations

from dagexec.building.fillers import Filler
from dagexec.building.net_builder import NetBuilder
from dagexec.building.scopes import layer
from dagexec.core.arguments import ArgumentValue


class NormalizationLayers(NetBuilder):
    """Normalization and dropout."""

    @layer
    def spatial_bn(
        self,
        blob_in: str,
        blob_out: str,
        dim_in: int,
        *,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        is_test: bool | None = None,
        scale_init: Filler | None = None,
    ) -> str:
        """Batch normalization per channel: scale `<out>_s`, shift `<out>_b`, mean `<out>_rm`, variance `<out>_riv`.

        With `is_test` the stored statistics are used; else those of the batch, and the stored ones are updated. By
        default the model's `training` decides.
        """
        test = not self.training if is_test is None else is_test
        init = self._initialization
        shape = [dim_in]
        learned = [
            self.add_parameter(f"{blob_out}_s", shape, scale_init or init.scale),
            self.add_parameter(f"{blob_out}_b", shape, init.shift),
        ]
        statistics = [
            self.add_parameter(f"{blob_out}_rm", shape, init.mean, trained=False),
            self.add_parameter(f"{blob_out}_riv", shape, init.variance, trained=False),
        ]
        outputs = [blob_out] if test else [blob_out, *statistics, f"{blob_out}_sm", f"{blob_out}_siv"]
        arguments: dict[str, ArgumentValue] = {"is_test": int(test), "epsilon": epsilon, **self._order_argument()}
        if not test:
            arguments["momentum"] = momentum
        return self.add_operator("SpatialBN", [blob_in, *learned, *statistics], outputs, **arguments)

    @layer
    def instance_norm(self, blob_in: str, blob_out: str, dim_in: int, *, epsilon: float = 1e-5) -> str:
        """Each channel of each image by its own mean and variance: scale `<out>_s`, shift `<out>_b` (Ulyanov 2016)."""
        arguments: dict[str, ArgumentValue] = {"epsilon": epsilon, **self._order_argument()}
        return self._standardized("InstanceNorm", blob_in, blob_out, [dim_in], arguments)

    @layer
    def group_norm(self, blob_in: str, blob_out: str, dim_in: int, groups: int = 32, *, epsilon: float = 1e-5) -> str:
        """Groups of neighboring channels of each image: scale `<out>_s`, shift `<out>_b` (Wu and He 2018)."""
        arguments: dict[str, ArgumentValue] = {"group": groups, "epsilon": epsilon, **self._order_argument()}
        return self._standardized("GroupNorm", blob_in, blob_out, [dim_in], arguments)

    @layer
    def layer_norm(
        self, blob_in: str, blob_out: str, shape: int | tuple[int, ...], *, axis: int = 1, epsilon: float = 1e-5
    ) -> str:
        """Over the axes from `axis` on, which have this shape: scale `<out>_s` and shift `<out>_b` of it (Ba 2016)."""
        sizes = [shape] if isinstance(shape, int) else list(shape)
        arguments: dict[str, ArgumentValue] = {"axis": axis, "epsilon": epsilon, "elementwise_affine": 1}
        return self._standardized("LayerNorm", blob_in, blob_out, sizes, arguments)

    @layer
    def lrn(
        self, blob_in: str, blob_out: str, *, size: int = 5, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
    ) -> str:
        """Local response normalization across channels (Krizhevsky et al. 2012, with alpha divided by the size)."""
        return self.add_operator(
            "LRN", [blob_in], [blob_out], size=size, alpha=alpha, beta=beta, bias=bias, **self._order_argument()
        )

    @layer
    def dropout(self, blob_in: str, blob_out: str, *, ratio: float = 0.5, is_test: bool | None = None) -> str:
        """With `is_test` the input itself; else a share `ratio` of elements set to zero, with mask `_<out>_mask`.

        What is dropped depends on the model's seed, the layer's name and the step (`iteration`), and on nothing else.
        By default the model's `training` decides on `is_test`.
        """
        if not self.training if is_test is None else is_test:
            return self.add_operator("Dropout", [blob_in], [blob_out], ratio=ratio, is_test=1)
        outputs = [blob_out, f"_{blob_out}_mask"]
        written = self.add_operator("Dropout", [blob_in, self.iteration()], outputs, ratio=ratio, is_test=0)
        self.net.op[-1].device_option.random_seed = self.seed_of(written)
        return written

    def _standardized(
        self, op_type: str, blob_in: str, blob_out: str, shape: list[int], arguments: dict[str, ArgumentValue]
    ) -> str:
        init = self._initialization
        affine = [
            self.add_parameter(f"{blob_out}_s", shape, init.scale),
            self.add_parameter(f"{blob_out}_b", shape, init.shift),
        ]
        outputs = [blob_out, f"_{blob_out}_mean", f"_{blob_out}_std"] if self.training else [blob_out]
        return self.add_operator(op_type, [blob_in, *affine], outputs, **arguments)
