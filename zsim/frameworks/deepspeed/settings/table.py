"""`[strategy]` of DeepSpeed's ZeRO."""

# See [Note: annotations of tables].

from typing import Any, Literal

from pydantic import Field, field_validator

from zsim.frameworks.deepspeed.settings.text import load_object
from zsim.specs.messages import TypedTable
from zsim.specs.strategy.table import Count, StrategyTable


class DeepSpeedTable(StrategyTable):
    """`kind = "deepspeed"`: a stage with DeepSpeed's defaults, or the user's file.

    `tile_numel` is that of `deepspeed.zero.TiledLinear`, and `zero_init` is `deepspeed.zero.Init`.
    `delayed_parameter_update` is ZeRO-Offload's (arXiv 2101.06840, section 5.2) and in no release of
    DeepSpeed.
    """

    kind: Literal["deepspeed"] = Field(description="whose data parallelism")
    stage: Literal[0, 1, 2, 3] | None = Field(
        default=None,
        description="ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters; left "
        "out: that of `config`",
    )
    config: str | dict[str, Any] | None = Field(
        default=None,
        description="DeepSpeed's JSON file, or its content as a table; left out: DeepSpeed's defaults at "
        "`stage`",
    )
    config_name: str | None = Field(
        default=None, description="what messages call a `config` that is a table; left out: DeepSpeed config"
    )
    version: str = Field(default="0.19.8", description="the release whose behaviour and defaults apply")
    fetches_one_by_one: bool = Field(
        default=False, description="stage 3 gathers parameters one by one, as before 0.6"
    )
    scatters_after_backward: bool = Field(
        default=False, description="stage 1 scatters whole gradients after backward, as before 0.4"
    )

    @field_validator("version", mode="before")
    @classmethod
    def _check_version_is_text(cls, value: object) -> object:
        if isinstance(value, int | float):
            raise ValueError(f'found the number {value}, expected a release in quotes, as in "0.19.8"')
        return value

    leaf_modules: tuple[str, ...] = Field(
        default=(),
        description="classes that stage 3 fetches whole (`set_z3_leaf_modules`, "
        '`deepspeed_moe_layer_cls_names`), as "MixtralSparseMoeBlock"',
    )
    tile_numel: Count | None = Field(
        default=None,
        description="largest tile, in weights, of `deepspeed.zero.TiledLinear`; left out: no tiles",
    )
    zero_init: bool = Field(
        default=True,
        description="stage 3 builds the model sharded, as the Trainer does; false: every GPU first "
        "holds all of it",
    )
    delayed_parameter_update: bool = Field(
        default=False,
        description="the CPU's update overlaps the next step (ZeRO-Offload, section 5.2); in no release",
    )
    host_gradient_sums: bool = Field(
        default=True,
        description="stage 3 with `offload_optimizer` sums 16-bit gradients on the host, as all "
        "releases do; false: ZeRO-Infinity as published",
    )
    optimizer_step: Count | None = Field(
        default=None,
        description="the step simulated under OneBitAdam, OneBitLamb or ZeroOneAdam, from 1 on; left "
        "out: a compressed one of the last phase",
    )
    expert_layer: Literal["autoep", "moe"] | None = Field(
        default=None,
        description="whose expert layer: AutoEP's, or `deepspeed.moe.layer.MoE`; left out: AutoEP's "
        'if enabled, else "moe" if `expert` is above 1',
    )
    drops_tokens: bool = Field(
        default=True,
        description="`drop_tokens` of `deepspeed.moe.layer.MoE`; false: every expert is filled up to the "
        "fullest",
    )

    @property
    def has_settings_file(self) -> bool:
        return self.config is not None

    def file_content(self) -> object:
        return load_object(self.config, None)[1] if isinstance(self.config, str) else None

    def batch_overrides(self, micro_batch: int, steps: int, replicas: int) -> dict[str, int | None]:
        if self.config is None:
            return super().batch_overrides(micro_batch, steps, replicas)
        return {
            "strategy.config.train_micro_batch_size_per_gpu": micro_batch,
            "strategy.config.gradient_accumulation_steps": steps,
            "strategy.config.train_batch_size": micro_batch * steps * replicas,
            "training.micro_batch_size": None,
            "training.gradient_accumulation_steps": None,
        }


class DeepSpeed(TypedTable, DeepSpeedTable):
    """DeepSpeed's ZeRO, a stage with its defaults or a configuration.

    `zsim.DeepSpeed(stage=3)` or `zsim.DeepSpeed(config="ds_config.json")`, where `config` may also be the
    file's content as a dict.
    """

    kind: Literal["deepspeed"] = Field(default="deepspeed", description="whose data parallelism")
