"""Where ranks run and how they are grouped: platform, process groups, Megatron-Core on CPU."""

import warnings

# Megatron warns at import about packages that the CPU platform does without; start_platform("cuda") requires them.
for _message in ("Transformer Engine and Apex are not installed", "Apex is not installed"):
    warnings.filterwarnings("ignore", message=_message)
