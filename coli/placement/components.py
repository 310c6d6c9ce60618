"""What a plan can move: the dense components of a model, its experts, and what a context costs.

A ``ModelShape`` is plain numbers; it can be written by hand, made from a ``config.json`` (a dict: this module opens
no file) or from a container that someone else has opened.  Invariant: its components are distinct, of known names, of
at least one byte each, and stand in the order in which they are offered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from coli.errors import PlacementError
from coli.placement.geometry import Geometry
from coli.placement.sizes import LAYOUTS, matrix_bytes, slab_bytes

# The order of the offers: a kind is offered layer by layer before the next kind begins.
COMPONENTS = ("lmhead", "dnproj", "dnout", "attnproj", "shexp")


class Component(NamedTuple):
    """One dense component.  ``layer`` is None for lmhead, which belongs to no layer."""

    name: str
    layer: int | None
    bytes: int

    @property
    def label(self) -> str:
        """What messages call it: ``lmhead``, ``dnproj 3``."""
        return self.name if self.layer is None else f"{self.name} {self.layer}"


@dataclass(frozen=True)
class ModelShape:
    """The sizes that a plan needs to know of a model.

    components : (name, layer, bytes) of each movable dense component; lmhead's layer is ignored.
    layers : model layers.   n_experts, topk : routed experts of a layer, and how many a token uses.
    expert_bytes : what one expert occupies in VRAM (a slot).
    expert_layers : the layers that have experts, as indexes or as a number (the first so many); None is all.
    cpu_bytes_ratio : bytes that the CPU reads for an expert over ``expert_bytes``.
    kv_bytes_per_position : keys and values of one position, all attention layers.
    state_bytes : recurrent state of one sequence, whatever its length.
    vector_bytes : what a card keeps beside the projections of all DeltaNet layers, and of all attention layers.
    rest_bytes : what the CPU reads for each token and no plan moves (router, norms, gates, one embedding row).
    fixed_bytes : all that no plan moves: those, and the rest of the embedding.
    max_context : the longest context that the model was made for; None where it is not known.

    Raises PlacementError naming the field or component.
    """

    components: tuple[Component, ...]
    _: KW_ONLY
    layers: int
    n_experts: int
    topk: int
    expert_bytes: int
    expert_layers: tuple[int, ...] | int | None = None
    cpu_bytes_ratio: float = 1.0
    kv_bytes_per_position: int = 0
    state_bytes: int = 0
    vector_bytes: tuple[int, int] = (0, 0)
    rest_bytes: int = 0
    fixed_bytes: int = 0
    max_context: int | None = None

    def __post_init__(self) -> None:
        has_experts = 1 if self.n_experts else 0
        smallest = {"layers": 1, "n_experts": 0, "topk": has_experts, "expert_bytes": has_experts}
        smallest |= {"kv_bytes_per_position": 0, "state_bytes": 0, "rest_bytes": 0, "fixed_bytes": 0}
        for field, least in smallest.items():
            self._set(field, _whole(field, getattr(self, field), least))
        if self.topk > self.n_experts:
            raise PlacementError(f"ModelShape: topk is {self.topk}, but a layer has n_experts = {self.n_experts}")
        if not 0 < self.cpu_bytes_ratio < float("inf"):
            raise PlacementError(f"ModelShape: cpu_bytes_ratio is {self.cpu_bytes_ratio}; expected a positive number")
        self._set("expert_layers", self._checked_expert_layers())
        self._set("components", self._checked_components())

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)  # the dataclass is frozen for everyone else

    def _checked_expert_layers(self) -> tuple[int, ...]:
        given = self.layers if self.expert_layers is None else self.expert_layers
        indexes = tuple(given) if isinstance(given, Iterable) else tuple(range(_whole("expert_layers", given, 0)))
        for layer in indexes:
            self._check_layer("expert_layers", layer)
        if len(set(indexes)) != len(indexes):
            raise PlacementError(f"ModelShape: expert_layers names a layer twice: {list(indexes)}")
        return tuple(sorted(indexes)) if self.n_experts else ()

    def _checked_components(self) -> tuple[Component, ...]:
        made: dict[tuple[str, int | None], Component] = {}
        for name, layer, n_bytes in self.components:
            if name not in COMPONENTS:
                raise PlacementError(f"ModelShape: component {name!r} is not one of {', '.join(COMPONENTS)}")
            if name == "lmhead":
                layer = None
            else:
                self._check_layer(name, layer)
            item = Component(name, layer, n_bytes)
            if (name, layer) in made:
                raise PlacementError(f"ModelShape: {item.label} is listed twice")
            made[name, layer] = item._replace(bytes=_whole(item.label, n_bytes, 1))
        return tuple(sorted(made.values(), key=lambda item: (COMPONENTS.index(item.name), item.layer or 0)))

    def _check_layer(self, owner: str, layer: Any) -> None:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.layers:
            raise PlacementError(
                f"ModelShape: {owner} has layer {layer!r}; the model has layers 0 to {self.layers - 1}"
            )

    @property
    def expert_count(self) -> int:
        """Routed experts of the whole model."""
        return self.n_experts * len(self.expert_layers)

    @property
    def cpu_expert_bytes(self) -> float:
        """Bytes that the CPU reads for one routed expert."""
        return self.expert_bytes * self.cpu_bytes_ratio

    @property
    def trunk_bytes(self) -> int:
        """Bytes of all components together."""
        return sum(item.bytes for item in self.components)

    def kv_bytes(self, context: int) -> int:
        """Bytes of keys and values for one sequence of ``context`` positions."""
        return self.kv_bytes_per_position * context

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        *,
        expert_bits: int = 4,
        trunk_bits: int = 8,
        layout: str = "r16",
        expert_bytes: int | None = None,
        cpu_bytes_ratio: float = 1.0,
    ) -> ModelShape:
        """The shape of what ``coli convert`` would make of a checkpoint.

        config : ``config.json`` as a dict, nested or flat.
        expert_bits, trunk_bits : 4 (group scales), 8 (row scales) or 16 (as stored).
        layout : "r16", our container, or "flat", a payload with one float32 scale a row.
        expert_bytes : a slot's size, where it is not what the layout gives.

        Raises ModelError naming the config's field, PlacementError naming the argument.
        """
        if layout not in LAYOUTS:
            raise PlacementError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
        geometry = Geometry.from_dict(config)
        trunk = _format_of("trunk_bits", trunk_bits, geometry)
        experts = _format_of("expert_bits", expert_bits, geometry)
        slot = slab_bytes(geometry.hidden_size, geometry.moe_intermediate_size, experts, layout)
        shared = slab_bytes(geometry.hidden_size, geometry.shared_expert_intermediate_size, trunk, layout)
        return cls._from_geometry(
            geometry,
            geometry.components(lambda rows, cols: matrix_bytes(rows, cols, trunk, layout), shared),
            slot if expert_bytes is None else expert_bytes,
            kv_number_bytes=4 if trunk_bits == 16 else 2,  # docs/numerics.md, section 2
            rest_bytes=geometry.rest_bytes,
            fixed_bytes=geometry.fixed_bytes,
            cpu_bytes_ratio=cpu_bytes_ratio,
        )

    @classmethod
    def from_container(cls, container: Any) -> ModelShape:
        """The shape of an opened ``coli.container.reader.Container``: its tensors' own bytes; no weight is read."""
        sizes: dict[tuple[str, int | None], int] = {}
        for name, tensor in container.tensors.items():
            component = tensor.entry.component
            if component in COMPONENTS:
                key = component, None if component == "lmhead" else int(name.split(".")[1])  # layers.N.rest
                sizes[key] = sizes.get(key, 0) + tensor.place.n_bytes
        # The head of a tied 16-bit container is its embedding.
        sizes.setdefault(("lmhead", None), container.tensors["embed_tokens"].place.n_bytes)
        read, moved = container.bytes_read_per_token(), (*COMPONENTS, "experts")
        return cls._from_geometry(
            Geometry.from_config(container.config),
            [(name, layer, n_bytes) for (name, layer), n_bytes in sizes.items()],
            container.manifest.experts["stride_bytes"],
            kv_number_bytes={"float16": 2, "float32": 4}[container.manifest.kv_dtype],
            rest_bytes=sum(n for name, n in read.items() if name not in moved),
            fixed_bytes=sum(t.place.n_bytes for t in container.tensors.values() if t.entry.component not in moved),
        )

    @classmethod
    def _from_geometry(
        cls,
        geometry: Geometry,
        components: Iterable[tuple[str, int | None, int]],
        expert_bytes: int,
        *,
        kv_number_bytes: int,
        rest_bytes: int,
        fixed_bytes: int,
        cpu_bytes_ratio: float = 1.0,
    ) -> ModelShape:
        return cls(
            tuple(Component(*item) for item in components),
            layers=geometry.num_hidden_layers,
            n_experts=geometry.num_experts,
            topk=geometry.num_experts_per_tok,
            expert_bytes=expert_bytes,
            cpu_bytes_ratio=cpu_bytes_ratio,
            kv_bytes_per_position=geometry.kv_bytes_per_position(kv_number_bytes),
            state_bytes=geometry.state_bytes,
            vector_bytes=geometry.vector_bytes,
            rest_bytes=rest_bytes,
            fixed_bytes=fixed_bytes,
            max_context=geometry.max_position_embeddings,
        )


def _format_of(argument: str, bits: int, geometry: Geometry) -> str:
    formats = {4: "i4_group", 8: "i8_row", 16: geometry.stored}
    if bits not in formats:
        raise PlacementError(f"{argument} is {bits!r}; expected 4, 8 or 16")
    return formats[bits]


def _whole(field: str, value: Any, least: int) -> int:
    """A whole number of at least ``least``; 0.5 * 2**20 is one, though Python calls it a float."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlacementError(f"ModelShape: {field} is {value!r}; expected a whole number of at least {least}")
    return value
