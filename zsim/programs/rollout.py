"""A step of reinforcement learning in files of programs: what they say besides the update, as `[rl]`.

A file says how long prompts and responses may be, not how long they are. Until the user does, a response has
the mean that published runs have of their cap, and a prompt that of their questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.specs.formats.config_file import TrainingFile

_RESPONSE_SHARE, _MOST_TOKENS = 0.51, 3252
"""Mean length of responses over their cap, the geometric mean of twelve published runs with caps up to 4,096
tokens, 0.26 to 0.81, and the longest mean of these (`python -m validation.rl.calibration RUNS.csv`)."""
PROMPT_TOKENS = 128
"""Tokens of a prompt: 99 to 132 in the published steps of NeMo-RL (OpenMathInstruct-2)."""


def assumed_response(cap: int) -> int:
    """Mean tokens of responses whose cap alone is known. No published run says what it is with caps above
    4,096 tokens.
    """
    return max(1, min(round(_RESPONSE_SHARE * cap), _MOST_TOKENS))


def set_rollout(
    file: TrainingFile,
    framework: str,
    *,
    prompts: int,
    samples: int,
    mini_batch: int,
    prompt_cap: int,
    response_cap: int,
    update: str,
    others: Mapping[str, Any],
    has_cap: bool = True,
) -> None:
    """Add a step's prompts, responses and engine to the file's settings.

    `update` says of what the update is that commands without `[rl]` simulate. Of `others`, dotted keys of
    `[rl]`, those without a value are left to the framework. A mini-batch of all samples, or more, is one
    update. Without `has_cap` a response may take what the prompt leaves of the sequence, which `response_cap`
    is with the assumed prompt.
    """
    total = prompts * samples
    file.settings |= {
        "rl.framework": framework,
        "rl.prompts_per_step": prompts,
        "rl.samples_per_prompt": samples,
    }
    if has_cap:
        file.settings["rl.lengths.max_response"] = response_cap
    if mini_batch < total:
        file.settings["rl.mini_batch_samples"] = mini_batch
    file.settings |= {f"rl.{key}": value for key, value in others.items() if value is not None}
    prompt, response = min(PROMPT_TOKENS, prompt_cap), assumed_response(response_cap)
    file.defaults |= {"rl.lengths.prompt.mean": prompt, "rl.lengths.response.mean": response}
    file.note(
        f"`zsim run` simulates the whole step: {prompts:,} prompts with {samples:,} responses. Commands that "
        f"take no [rl] simulate one update alone: {update}"
    )
    file.default_notes = {
        "rl.lengths.prompt.mean": f"prompts of {prompt:,} tokens are assumed (rl.lengths.prompt.mean)",
        "rl.lengths.response.mean": f"responses of {response:,} tokens in the mean are assumed, as the file "
        "has only their cap (rl.lengths.response.mean). Where updates take half as long in a log, its "
        "responses are about half as long",
    }


def skip_rollout(file: TrainingFile, reason: str, update: str) -> None:
    """Say why the rest of the step is left out, and of what the update is that is simulated."""
    file.note(f"one update alone is simulated, {update}: {reason}")
