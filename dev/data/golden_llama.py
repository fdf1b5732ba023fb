#!/usr/bin/env python3
"""Makes dev/test/golden/llama.json: losses and gradients of small Llama, Qwen2, Nemotron, Qwen3 and
Mistral models, by PyTorch in float64, and of the last two by transformers as well.

    golden_llama.py > dev/test/golden/llama.json

Weights and tokens come from a small generator that dev/test/test_llama.c has too, so that only the
results are kept: the mean loss, and of every gradient its L2 norm and its product with further
numbers of the generator. The models are written here from their papers; gradients are PyTorch's.
Cases with "by" are transformers' own model in float64. It has norms, softmax and angles in float32
even then. Needs the packages torch and transformers from PyPI; a machine without a GPU will do.
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
    C, F, V, HS = g["C"], g["F"], g["V"], g["HS"]
    A, K = g["NH"] * HS, g["KV"] * HS
    nemotron = g["type"] == "nemotron"
    norms = lambda name: [(name + ".weight", [C])] + ([(name + ".bias", [C])] if nemotron else [])
    rows = [("model.embed_tokens.weight", [V, C])]
    for layer in range(g["L"]):
        at = f"model.layers.{layer}."
        rows += norms(at + "input_layernorm")
        rows += [
            (at + f"self_attn.{x}_proj.weight", [n, C]) for x, n in (("q", A), ("k", K), ("v", K))
        ]
        if g["type"] == "qwen2":
            rows += [
                (at + f"self_attn.{x}_proj.bias", [n]) for x, n in (("q", A), ("k", K), ("v", K))
            ]
        if g["type"] == "qwen3":
            rows += [(at + f"self_attn.{x}_norm.weight", [HS]) for x in "qk"]
        rows += [(at + "self_attn.o_proj.weight", [C, A])] + norms(at + "post_attention_layernorm")
        rows += [] if nemotron else [(at + "mlp.gate_proj.weight", [F, C])]
        rows += [(at + "mlp.up_proj.weight", [F, C]), (at + "mlp.down_proj.weight", [C, F])]
    return rows + norms("model.norm") + ([] if g["tied"] else [("lm_head.weight", [V, C])])


def norm(g, w, name, x):
    if g["type"] != "nemotron":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + g["epsilon"]) * w[name + ".weight"]
    x = x - x.mean(-1, keepdim=True)
    return (
        x / torch.sqrt((x * x).mean(-1, keepdim=True) + g["epsilon"]) * (w[name + ".weight"] + 1)
        + w[name + ".bias"]
    )


def turn(g, x):
    """RoPE on x (B, heads, T, HS)."""
    D = int(x.shape[-1] * g["rotary"])
    f = g["theta"] ** (-2 * torch.arange(D // 2) / D)
    if g["factor"]:
        turns = g["original"] * f / (2 * math.pi)
        share = ((turns - g["low"]) / (g["high"] - g["low"])).clamp(0, 1)
        f = f * ((1 - share) / g["factor"] + share)
    angle = torch.arange(x.shape[2])[:, None] * f
    a, b, rest = x[..., : D // 2], x[..., D // 2 : D], x[..., D:]
    return torch.cat(
        [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1
    )


def loss_of(g, w, inputs, targets):
    B, T = inputs.shape
    HS = g["HS"]
    x = w["model.embed_tokens.weight"][inputs]
    hidden = torch.full((T, T), -math.inf).triu(1)
    if g["window"]:
        hidden += torch.full((T, T), -math.inf).tril(-g["window"])
    for layer in range(g["L"]):
        at = f"model.layers.{layer}."
        y = norm(g, w, at + "input_layernorm", x)
        heads = {}
        for name, count in (("q", g["NH"]), ("k", g["KV"]), ("v", g["KV"])):
            z = y @ w[at + f"self_attn.{name}_proj.weight"].T + w.get(
                at + f"self_attn.{name}_proj.bias", 0
            )
            z = z.reshape(B, T, count, HS)
            if at + f"self_attn.{name}_norm.weight" in w:
                z = norm(g, w, at + f"self_attn.{name}_norm", z)
            heads[name] = z.transpose(1, 2)
        q, k, v = turn(g, heads["q"]), turn(g, heads["k"]), heads["v"]
        k, v = (z.repeat_interleave(g["NH"] // g["KV"], 1) for z in (k, v))
        y = (
            ((q @ k.transpose(2, 3) / math.sqrt(HS) + hidden).softmax(-1) @ v)
            .transpose(1, 2)
            .reshape(B, T, -1)
        )
        x = x + y @ w[at + "self_attn.o_proj.weight"].T
        y = norm(g, w, at + "post_attention_layernorm", x)
        up = y @ w[at + "mlp.up_proj.weight"].T
        if g["type"] == "nemotron":
            y = up.relu() ** 2
        else:
            y = torch.nn.functional.silu(y @ w[at + "mlp.gate_proj.weight"].T) * up
        x = x + y @ w[at + "mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if g["tied"] else "lm_head.weight"]
    logits = norm(g, w, "model.norm", x) @ head.T
    return torch.nn.functional.cross_entropy(logits.reshape(B * T, -1), targets.reshape(-1))


def transformers_loss(g, w, inputs, targets):
    config = transformers.AutoConfig.for_model(
        g["type"],
        num_hidden_layers=g["L"],
        hidden_size=g["C"],
        num_attention_heads=g["NH"],
        num_key_value_heads=g["KV"],
        head_dim=g["HS"],
        intermediate_size=g["F"],
        vocab_size=g["V"],
        max_position_embeddings=64,
        rms_norm_eps=g["epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": g["theta"]},
        tie_word_embeddings=g["tied"],
        **({"sliding_window": g["window"] or None} if g["type"] == "mistral" else {}),
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    logits = torch.func.functional_call(model, w, (inputs,), strict=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


COMMON = {
    "L": 2,
    "C": 24,
    "NH": 4,
    "KV": 2,
    "HS": 6,
    "window": 0,
    "F": 40,
    "V": 37,
    "B": 2,
    "T": 11,
    "factor": 0,
    "low": 1,
    "high": 4,
    "original": 16,
    "seed": 5,
    "scale": 0.3,
}
CASES = [
    {
        **COMMON,
        "type": "llama",
        "tied": False,
        "theta": 100.0,
        "epsilon": 1e-5,
        "rotary": 1.0,
        "factor": 8,
    },
    {**COMMON, "type": "qwen2", "tied": True, "theta": 1e4, "epsilon": 1e-6, "rotary": 1.0},
    {
        **COMMON,
        "type": "nemotron",
        "tied": False,
        "theta": 1e4,
        "epsilon": 1e-5,
        "rotary": 0.3334,
        "KV": 1,
    },
    {
        **COMMON,
        "type": "qwen3",
        "tied": True,
        "theta": 1e4,
        "epsilon": 1e-6,
        "rotary": 1.0,
        "HS": 10,
    },
    {
        **COMMON,
        "type": "mistral",
        "tied": False,
        "theta": 1e4,
        "epsilon": 1e-5,
        "rotary": 1.0,
        "window": 4,
    },
]
CASES += [{**g, "by": "transformers"} for g in CASES[-2:]]

results = []
for g in CASES:
    numbers = Generator(g["seed"])
    w = {}
    for name, shape in tensors(g):
        one = len(shape) == 1 and name.endswith("norm.weight") and g["type"] != "nemotron"
        values = [one + g["scale"] * numbers.noise() for _ in range(math.prod(shape))]
        w[name] = torch.tensor(values).to(torch.float32).double().reshape(shape).requires_grad_()
    tokens = torch.tensor(
        [int((numbers.noise() + 1) / 2 * g["V"]) for _ in range(g["B"] * g["T"] + 1)]
    )
    compute = transformers_loss if "by" in g else loss_of
    loss = compute(g, w, *(x.reshape(g["B"], g["T"]) for x in (tokens[:-1], tokens[1:])))
    loss.backward()
    gradients = {}
    for name, x in w.items():
        direction = torch.tensor([numbers.noise() for _ in range(x.numel())])
        gradients[name] = [x.grad.norm().item(), (x.grad.reshape(-1) * direction).sum().item()]
    results.append({"model": g, "loss": loss.item(), "gradients": gradients})
print(json.dumps(results, indent=1))
