#!/usr/bin/env python3
"""Makes dev/test/golden/5d.json: losses and gradients of small Qwen3-MoE and Mixtral models by
transformers' own classes in float64, which have norms, softmax and angles in float32 even then.

    golden_5d.py > dev/test/golden/5d.json

Weights and tokens come from a small generator that dev/test/test_5d.c has too, so that only the
results are kept: the mean loss, and of every gradient its L2 norm and its product with further
numbers of the generator. Needs the packages torch and transformers from PyPI; a machine without a
GPU will do.
"""

import sys

if {"-h", "--help"} & set(sys.argv[1:]):
    sys.exit(print(__doc__))

import json
import math

import torch
import transformers

torch.set_default_dtype(torch.float64)


class Generator:
    def __init__(self, seed):
        self.state = seed

    def noise(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 11) / 4503599627370496.0 - 1.0


def tensors(g):
    """Names and shapes, in the order of the file."""
    C, F, V, HS, E = g["C"], g["F"], g["V"], g["HS"], g["E"]
    A, K = g["NH"] * HS, g["KV"] * HS
    qwen = g["type"] == "qwen3_moe"
    parts = ("gate_proj", "up_proj", "down_proj") if qwen else ("w1", "w3", "w2")
    rows = [("model.embed_tokens.weight", [V, C])]
    for layer in range(g["L"]):
        at = f"model.layers.{layer}."
        rows += [(at + "input_layernorm.weight", [C])]
        for x, n in (("q", A), ("k", K), ("v", K)):
            rows += [(at + f"self_attn.{x}_proj.weight", [n, C])]
        if qwen:
            rows += [(at + f"self_attn.{x}_norm.weight", [HS]) for x in "qk"]
        rows += [(at + "self_attn.o_proj.weight", [C, A])]
        rows += [(at + "post_attention_layernorm.weight", [C])]
        at += "mlp." if qwen else "block_sparse_moe."
        rows += [(at + "gate.weight", [E, C])]
        for expert in range(E):
            for part, shape in zip(parts, ([F, C], [F, C], [C, F])):
                rows += [(at + f"experts.{expert}.{part}.weight", shape)]
    return rows + [("model.norm.weight", [C]), ("lm_head.weight", [V, C])]


def fused(g, w):
    """The same weights by the names that transformers 5 has in memory."""
    qwen = g["type"] == "qwen3_moe"
    parts = ("gate_proj", "up_proj", "down_proj") if qwen else ("w1", "w3", "w2")
    out = {name: x for name, x in w.items() if ".experts." not in name}
    for layer in range(g["L"]):
        at = f"model.layers.{layer}." + ("mlp." if qwen else "block_sparse_moe.")
        gate, up, down = (
            [w[at + f"experts.{e}.{part}.weight"] for e in range(g["E"])] for part in parts
        )
        to = f"model.layers.{layer}.mlp."
        out[to + "gate.weight"] = out.pop(at + "gate.weight")
        out[to + "experts.gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(gate, up)]
        )
        out[to + "experts.down_proj"] = torch.stack(down)
    return out


def loss_of(g, w, inputs, targets):
    config = transformers.AutoConfig.for_model(
        g["type"],
        num_hidden_layers=g["L"],
        hidden_size=g["C"],
        num_attention_heads=g["NH"],
        num_key_value_heads=g["KV"],
        head_dim=g["HS"],
        intermediate_size=g["F"],
        moe_intermediate_size=g["F"],
        num_experts=g["E"],
        num_local_experts=g["E"],
        num_experts_per_tok=g["k"],
        norm_topk_prob=g["normalised"],
        vocab_size=g["V"],
        max_position_embeddings=64,
        rms_norm_eps=g["epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": g["theta"]},
        tie_word_embeddings=False,
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    model = model.double()
    weights = fused(g, w)
    assert set(weights) == set(model.state_dict()), set(weights) ^ set(model.state_dict())
    logits = torch.func.functional_call(model, weights, (inputs,)).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


COMMON = {
    "L": 2,
    "C": 24,
    "NH": 4,
    "KV": 2,
    "F": 10,
    "V": 37,
    "B": 2,
    "T": 12,
    "E": 4,
    "k": 2,
    "theta": 1e4,
    "seed": 5,
    "scale": 0.3,
}
CASES = [
    {**COMMON, "type": "qwen3_moe", "HS": 10, "epsilon": 1e-6, "normalised": True},
    {**COMMON, "type": "qwen3_moe", "HS": 6, "epsilon": 1e-6, "normalised": False, "k": 3},
    {**COMMON, "type": "mixtral", "HS": 6, "epsilon": 1e-5, "normalised": True},
]

results = []
for g in CASES:
    numbers = Generator(g["seed"])
    w = {}
    for name, shape in tensors(g):
        one = len(shape) == 1
        values = [one + g["scale"] * numbers.noise() for _ in range(math.prod(shape))]
        w[name] = torch.tensor(values).to(torch.float32).double().reshape(shape).requires_grad_()
    tokens = torch.tensor(
        [int((numbers.noise() + 1) / 2 * g["V"]) for _ in range(g["B"] * g["T"] + 1)]
    )
    loss = loss_of(g, w, *(x.reshape(g["B"], g["T"]) for x in (tokens[:-1], tokens[1:])))
    loss.backward()
    gradients = {}
    for name, x in w.items():
        direction = torch.tensor([numbers.noise() for _ in range(x.numel())])
        gradients[name] = [x.grad.norm().item(), (x.grad.reshape(-1) * direction).sum().item()]
    results.append({"model": g, "loss": loss.item(), "gradients": gradients})
print(json.dumps(results, indent=1))
