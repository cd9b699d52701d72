"""`[network]` of a cluster file: the fabric that joins the nodes.

Every kind has its own keys (`KEYS`), and a key that does not belong to the chosen kind is an error. Rates are
per direction. A link between switches is as fast as a network card's link unless `link_bandwidth` is set.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from zsim.errors import did_you_mean
from zsim.specs.lazy_model import Fraction, Table
from zsim.units import BytesPerSecond, Seconds

Count = Annotated[int, Field(gt=0, strict=True)]
NetworkKind = Literal["single-switch", "fat-tree", "rail-optimized", "dragonfly", "torus", "links"]

SHARED_KEYS = ("kind", "source", "evidence", "latency", "hop_latency")
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

    "node3" is a complete node, whose traffic is spread over its cards, and "node3.nic2" is one card. Every
    other name is a switch.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", defer_build=True, populate_by_name=True, allow_inf_nan=False
    )

    source_end: str = Field(
        alias="from",
        min_length=1,
        description='a node ("node3"), one card ("node3.nic2"), or a switch\'s name',
    )
    target_end: str = Field(alias="to", min_length=1, description="the other end, likewise")
    bandwidth: BytesPerSecond = Field(gt=0, description="of one cable, in each direction")
    count: Count = Field(default=1, description="parallel cables")
    tier: str = Field(default="link", description="name of the links in reports")


class Network(Table):
    """The fabric between nodes, of one of these kinds:

    - `single-switch`: never blocks.
    - `fat-tree`: leaf switches of `nodes_per_leaf` nodes (all their cards), under spines. With `levels` = 3,
      `leaves_per_pod` leaves and their middle switches make a pod under a core.
    - `rail-optimized`: the same, but a leaf takes the cards of one number (one rail) of its nodes.
    - `dragonfly`: routers in groups, all joined within a group, one trunk between every two groups.
    - `torus`: a router per node in a ring along every dimension of `shape`.
    - `links`: an explicit list.

    The excess of `latency` over the network that `[collectives]` was measured on (`measured_on`) is added to
    every round. `routing` `even-split` is adaptive routing or packet spraying. With `hash`, NCCL opens one
    flow per channel of a card and queue pair (NCCL_IB_QPS_PER_CONNECTION).
    """

    kind: NetworkKind = Field(description="the shape of the fabric; each has its own keys")
    latency: Seconds = Field(default=0.0, description="from card to card, without the cards' own")
    hop_latency: Seconds = Field(default=0.0, description="added by every switch after the first")
    nodes_per_leaf: Count = Field(default=16, description="nodes under one leaf switch")
    levels: Literal[2, 3] = Field(
        default=2, description="2: leaves and spines; 3: pods of leaves under a core"
    )
    leaves_per_pod: Count = Field(default=16, description="leaves of a pod, with three levels")
    oversubscription: float = Field(
        default=1.0, ge=1, description="bandwidth of a leaf's downlinks over that of its uplinks"
    )
    spine_oversubscription: float = Field(default=1.0, ge=1, description="the same, one level up")
    planes: Count = Field(default=1, description="copies of the tree that share the load of every card")
    nodes_per_router: Count = Field(default=2, description="nodes at a router of a dragonfly")
    routers_per_group: Count = Field(default=4, description="routers of a dragonfly's group, all joined")
    global_links_per_router: Count = Field(default=2, description="links of a router to other groups")
    shape: tuple[Count, ...] = Field(default=(), description="nodes along each dimension of a torus")
    links: tuple[Cable, ...] = Field(default=(), description="every cable of the fabric")
    link_bandwidth: BytesPerSecond | None = Field(
        default=None, gt=0, description="of a link between switches; left out: a card's"
    )
    efficiency: Fraction = Field(default=1.0, description="what large messages reach of a link's bandwidth")
    routing: Literal["even-split", "hash"] = Field(
        default="even-split",
        description="every flow over all shortest paths, or every flow on one that a hash chooses (ECMP)",
    )
    flows_per_pair: Count = Field(
        default=1, description="flows between two cards that are hashed on their own"
    )
    hash_seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] = Field(
        default=0, description="seed of the hash"
    )
    switch_ports: Count | None = Field(
        default=None,
        description="ports of a switch; a fabric that needs more is refused; left out: as many as it takes",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_keys_of_kind(cls, data: Any) -> Any:
        kind = data.get("kind") if isinstance(data, dict) else None
        if not isinstance(kind, str) or kind not in KEYS:
            return data
        allowed = (*SHARED_KEYS, *KEYS[kind])
        owners = {key: [name for name, keys in KEYS.items() if key in keys] for key in data}
        wrong = [
            f"'{key}' does not belong to kind '{kind}'; it is a key of {' and '.join(owners[key])}"
            f"{did_you_mean(key, allowed)}"
            for key in data
            if key not in allowed and owners[key]
        ]
        if wrong:
            unknown = [key for key in data if key not in cls.model_fields]
            wrong += [f"unknown key '{key}'{did_you_mean(key, allowed)}" for key in unknown]
            raise ValueError("; ".join(wrong))
        return data

    @model_validator(mode="after")
    def _check_consistency(self) -> Network:
        wrong = []
        if self.kind == "torus" and not 2 <= len(self.shape) <= 3:
            wrong.append(f"shape: found {len(self.shape)} dimensions, expected 2 or 3 numbers of nodes")
        if self.kind == "links" and not self.links:
            wrong.append("links: kind 'links' needs at least one [[network.links]] table")
        if self.levels == 2 and {"spine_oversubscription", "leaves_per_pod"} & self.model_fields_set:
            wrong.append("leaves_per_pod and spine_oversubscription need levels = 3")
        hashed = [key for key in ("flows_per_pair", "hash_seed") if key in self.model_fields_set]
        wrong += [f"{key} needs routing = 'hash'" for key in hashed if self.routing == "even-split"]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self
