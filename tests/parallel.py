"""One of two processes that share a model (`tests/test_parallel.py`): ``torchrun parallel.py MODEL CALIBRATED``. Prints
the findings of each process as JSON."""

import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import kvpass
from kvpass.schemes.fingerprint import fingerprint


def refused(fn, *args, **kwargs) -> str:
    """The message of the `KVPassError` that ``fn`` raises."""
    try:
        fn(*args, **kwargs)
    except kvpass.KVPassError as error:
        return str(error)
    return ""


def main(folder: str) -> None:
    torch.set_num_threads(1)
    shared = "RANK" in os.environ
    plan = {"distributed_config": DistributedConfig(tp_plan="auto")} if shared else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plan)
    ids = torch.arange(100)[None] % 50
    found = {"fingerprint": fingerprint(model)}
    if shared:
        found["compiled"] = refused(kvpass.apply, model, "kivi")
        found["captured"] = refused(kvpass.apply, model, "squat", lowering="eager")
        found["calibrated"] = refused(kvpass.calibrate, model, ids.expand(2, -1), "aqua")
    kvpass.apply(model, "kivi", lowering="eager")
    found["tokens"] = model.generate(ids, max_new_tokens=40, do_sample=False)[0, 100:].tolist()
    found["bytes"] = kvpass.explain(model).layers[0].nbytes
    sys.stdout.write(f"FOUND {json.dumps(found)}\n")  # in one write, because the other process prints too


if __name__ == "__main__":
    main(sys.argv[1])
