import numpy as np
from megatron_rl.records import StepBatch
from .packing import pack_for_ranks
class SftStream:
    def __init__(self, samples, *, config, seed, data_parallel_size, pad_multiple, pad_id):
        self.s=samples; self.c=config; self.seed=seed; self.a=dict(data_parallel_size=data_parallel_size,pad_multiple=pad_multiple,pad_id=pad_id); self.n=0
    def next_step(self, step):
        ids=[]
        for i in range(self.n,self.n+self.c.samples_per_step):
            e,p=divmod(i,len(self.s)); ids.append(np.random.default_rng([self.seed,e]).permutation(len(self.s))[p])
        self.n+=self.c.samples_per_step
        b=[self.s[i] for i in ids]
        return StepBatch(step,pack_for_ranks(b,capacity=self.c.microbatch_tokens,**self.a),int(sum(s.loss_mask.sum() for s in b)))
    def state_dict(self): return {"n":self.n}
    def load_state_dict(self,d): self.n=d["n"]
