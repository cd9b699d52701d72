"""The words that programs on top of transformers' Trainer share: TrainingArguments, PEFT, bitsandbytes."""
