"""Where ranks run and how they are grouped: platform, process groups, Megatron-Core on CPU."""
