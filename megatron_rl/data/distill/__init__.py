"""SFT data from a teacher: prefill distillation, and reasoning for tool calls that have none."""
