"""The objective as pure functions of per-token streams: tensors in, tensors out, no model and no process group."""
