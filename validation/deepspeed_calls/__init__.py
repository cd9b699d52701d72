"""The collectives of real DeepSpeed, configuration by configuration.

    python -m validation.deepspeed_calls --out traces/deepspeed            all of them; needs DeepSpeed
    python -m validation.deepspeed_calls --only stage3-live --ranks 2      one, printed

A configuration trains a small Llama on 2 and on 4 gloo ranks for four steps; written down are the calls of
the last one, when ZeRO-3's trace is complete. `traces/deepspeed/calls.json` has them all; zsim's plans are
held to it where DeepSpeed is not installed.

    python -m validation.deepspeed_calls.hooks --out traces/deepspeed      needs transformers too

writes `hooks.json`: the order in which ZeRO-3 enters the modules of Hugging Face's own models."""
