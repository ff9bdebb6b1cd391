import json
import numpy as np
from megatron_rl.config import ConfigModel, DataError
from megatron_rl.records import Sample
class SftDataConfig(ConfigModel):
    train: list[str]
    """a"""
    heldout: list[str] = []
    """a"""
    samples_per_step: int = 16
    """a"""
    microbatch_tokens: int = 4096
    """a"""
def sft_samples(path, renderer, *, context_length):
    out=[]
    for i,l in enumerate(open(path),1):
        r=json.loads(l); ids,m=renderer.conversation(r["messages"],r.get("tools"))
        out.append(Sample(f"{path}:{i}",np.array(ids,np.int32),np.array(m,bool)))
    return out
