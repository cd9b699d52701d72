"""`[network]` of a cluster file: the fabric that joins the nodes.

Every kind has its own keys (`KEYS`); a key that does not belong to the chosen kind is an error. Rates are
per direction; a link between switches is as fast as a network card's link unless `link_bandwidth` is set.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from zsim.errors import did_you_mean
from zsim.specs.cluster.table import Fraction, Table
from zsim.units import BytesPerSecond, Seconds

Count = Annotated[int, Field(gt=0, strict=True)]
NetworkKind = Literal["single-switch", "fat-tree", "rail-optimized", "dragonfly", "torus", "links"]

_SHARED = ("kind", "source", "evidence", "latency", "hop_latency")
_SWITCHED = ("link_bandwidth", "efficiency", "routing", "flows_per_pair", "hash_seed", "switch_ports")
_TREE = ("levels", "oversubscription", "spine_oversubscription", "leaves_per_pod", "planes")
KEYS: dict[str, tuple[str, ...]] = {
    "single-switch": ("switch_ports",),
    "fat-tree": ("nodes_per_leaf", *_TREE, *_SWITCHED),
    "rail-optimized": ("nodes_per_leaf", *_TREE, *_SWITCHED),
    "dragonfly": ("nodes_per_router", "routers_per_group", "global_links_per_router", *_SWITCHED),
    "torus": ("shape", "link_bandwidth", "efficiency"),
    "links": ("links", "efficiency", "routing", "flows_per_pair", "hash_seed"),
}


class Cable(BaseModel):
    """One entry of `[[network.links]]`: `count` parallel cables, both directions, between two devices.

    "node3" is a whole node (its traffic is spread over its cards), "node3.nic2" one card; every other name
    is a switch.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", defer_build=True, populate_by_name=True, allow_inf_nan=False
    )

    source_end: str = Field(alias="from", min_length=1)
    target_end: str = Field(alias="to", min_length=1)
    bandwidth: BytesPerSecond = Field(gt=0)
    count: Count = 1
    tier: str = "link"


class Network(Table):
    """The fabric between nodes.

    `single-switch`: never blocks. `fat-tree`: leaf switches of `nodes_per_leaf` nodes (all their cards),
    under spines; with `levels` = 3, `leaves_per_pod` leaves and their middle switches make a pod under a
    core. `rail-optimized`: the same, but a leaf takes the cards of one number (one rail) of its nodes.
    `planes` copies of the tree share the load of every card. `dragonfly`: routers in groups, all joined
    within a group, one trunk between every two groups. `torus`: a router per node in a ring along every
    dimension of `shape`. `links`: an explicit list.

    `latency`: from card to card, without the cards' own (`[nic]`); the excess over the network that
    `[collectives]` was measured on (`measured_on`) is added to every round. `hop_latency`: added by every
    switch after the first to a round between nodes. `oversubscription`: bandwidth of a leaf's downlinks over
    its uplinks; `spine_oversubscription` the same one level up. `routing`: `even-split` spreads every flow
    over all shortest paths (adaptive routing, packet spraying), `hash` puts each of `flows_per_pair` flows of
    a pair of cards on one path that a hash chooses (ECMP; NCCL opens one flow per channel of a card and queue
    pair, NCCL_IB_QPS_PER_CONNECTION); `hash_seed`: seed of that hash. `switch_ports`: ports of a switch; a
    fabric that needs more is refused.
    """

    kind: NetworkKind
    latency: Seconds = 0.0
    hop_latency: Seconds = 0.0
    nodes_per_leaf: Count = 16
    levels: Literal[2, 3] = 2
    leaves_per_pod: Count = 16
    oversubscription: float = Field(default=1.0, ge=1)
    spine_oversubscription: float = Field(default=1.0, ge=1)
    planes: Count = 1
    nodes_per_router: Count = 2
    routers_per_group: Count = 4
    global_links_per_router: Count = 2
    shape: tuple[Count, ...] = ()
    links: tuple[Cable, ...] = ()
    link_bandwidth: BytesPerSecond | None = Field(default=None, gt=0)
    efficiency: Fraction = 1.0
    routing: Literal["even-split", "hash"] = "even-split"
    flows_per_pair: Count = 1
    hash_seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] = 0
    switch_ports: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _keys_of_the_kind(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("kind") not in KEYS:
            return data
        kind = data["kind"]
        allowed = (*_SHARED, *KEYS[kind])
        for key in data:
            if key in allowed or key not in cls.model_fields:
                continue
            owners = [other for other, keys in KEYS.items() if key in keys]
            raise ValueError(
                f"'{key}' does not belong to kind '{kind}'; it is a key of {' and '.join(owners)}"
                f"{did_you_mean(key, allowed)}"
            )
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Network:
        if self.kind == "torus" and not 2 <= len(self.shape) <= 3:
            raise ValueError(f"shape: found {len(self.shape)} dimensions, expected 2 or 3 numbers of nodes")
        if self.kind == "links" and not self.links:
            raise ValueError("links: kind 'links' needs at least one [[network.links]] table")
        if self.levels == 2 and {"spine_oversubscription", "leaves_per_pod"} & self.model_fields_set:
            raise ValueError("leaves_per_pod and spine_oversubscription need levels = 3")
        for key in ("flows_per_pair", "hash_seed"):
            if self.routing == "even-split" and key in self.model_fields_set:
                raise ValueError(f"{key} needs routing = 'hash'")
        return self
