import numpy as np
from megatron_rl.records import PackedBatch, Sample
def next_k_fit(lengths, capacity, k):
    bins=[]; open_=[]; fill={}
    for i,n in enumerate(lengths):
        for b in open_:
            if fill[b]+n<=capacity: bins[b].append(i); fill[b]+=n; break
        else:
            if len(open_)==k: open_.pop(0)
            bins.append([i]); b=len(bins)-1; open_.append(b); fill[b]=n
    return bins
def _pack(samples, pad_multiple, pad_id):
    cat=lambda parts: np.concatenate(parts) if parts else np.zeros(0)
    T=sum(len(s.token_ids)-1 for s in samples); pad=-T%pad_multiple
    if T==0: pad=pad or pad_multiple
    lens=[len(s.token_ids)-1 for s in samples]+([pad] if pad else [])
    def st(name,fill,dt):
        if samples and getattr(samples[0],name) is None: return None
        return np.concatenate([getattr(s,name)[1:] for s in samples]+[np.full(pad,fill)]).astype(dt)
    return PackedBatch(np.concatenate([s.token_ids[:-1] for s in samples]+[np.full(pad,pad_id)]).astype(np.int32),
        np.concatenate([s.token_ids[1:] for s in samples]+[np.full(pad,pad_id)]).astype(np.int32),
        np.concatenate([s.loss_mask[1:] for s in samples]+[np.zeros(pad,bool)]).astype(bool),
        np.concatenate([[0],np.cumsum(lens)]).astype(np.int32),[s.sample_id for s in samples],pad,
        st("advantages",0,np.float32),st("engine_logp",np.nan,np.float32),st("weight_version",-1,np.int32),[s.info for s in samples])
def pack_samples(samples,*,capacity,pad_multiple=1,pad_id=0):
    return [_pack([samples[i] for i in b],pad_multiple,pad_id) for b in next_k_fit([len(s.token_ids)-1 for s in samples],capacity,256)]
def pack_for_ranks(samples,*,capacity,data_parallel_size,pad_multiple=1,pad_id=0):
    bs=pack_samples(samples,capacity=capacity,pad_multiple=pad_multiple,pad_id=pad_id)
    ranks=[bs[r::data_parallel_size] for r in range(data_parallel_size)]
    m=max(map(len,ranks))
    for r in ranks:
        while len(r)<m:
            f=_pack([],pad_multiple,pad_id)
            r.append(f)
    return ranks
