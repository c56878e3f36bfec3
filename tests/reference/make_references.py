#!/usr/bin/python3
"""Golden values of a tiny GPT-2 and two tiny Llamas, computed by PyTorch in float64.

    apt-get install python3-torch        # 1.13 of Debian 12, or any later one
    /usr/bin/python3 tests/reference/make_references.py [folder]
    /usr/bin/python3 tests/reference/make_references.py --bf16     # how far PyTorch's own bf16 is from them

Writes gpt2.bin, llama.bin (untied head) and llama_tied.bin beside this script: weights, tokens, targets, the
summed loss and its count, the gradient of the sum for every weight, and the weights after ten AdamW steps on
that batch. tests/reference/golden.hpp reads them. The models are written out plainly here, on purpose: they
share nothing with the library that they check, and no library of models is needed.

Starting weights come from a hash of name and index and are numbers that bf16 holds exactly, so that a bf16
run starts from the same ones. Layout: [out, in] for every matrix; names as in Hugging Face files.
"""
import math
import os
import struct
import sys

import torch

IGNORE = -100
BATCH, LENGTH = 3, 11
STEPS = 10
ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
WEIGHT_DECAY = 0.1


def hashed(stream, index):
    """64 random bits (splitmix64's finaliser)."""
    z = (stream * 0xD1342543DE82EF95 + index * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def stream_of(name):
    value = 0
    for byte in name.encode():
        value = (value * 131 + byte) % 2**64
    return value


def bf16_exact(value):
    """The nearest number with eight significant bits."""
    if value == 0:
        return 0.0
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def weights_of(shapes):
    """Matrices of deviation about 0.12, gains about 1, biases about 0: far from the saturated or linear."""
    weights = {}
    for name, shape in shapes.items():
        count = math.prod(shape)
        centre, spread = (0.0, 0.2) if len(shape) == 2 else (0.0, 0.2)
        if len(shape) == 1 and not name.endswith("bias"):
            centre = 1.0
        stream = stream_of(name)
        values = [bf16_exact(centre + spread * (hashed(stream, i) / 2**63 - 1)) for i in range(count)]
        weights[name] = torch.tensor(values, dtype=torch.float64).reshape(shape).requires_grad_()
    return weights


def batch_of(vocabulary):
    tokens = torch.tensor([[hashed(1, b * LENGTH + t) % vocabulary for t in range(LENGTH)] for b in range(BATCH)])
    targets = torch.tensor([[hashed(2, b * LENGTH + t) % vocabulary for t in range(LENGTH)] for b in range(BATCH)])
    targets[0, 4] = IGNORE
    targets[2, 6:] = IGNORE  # padding of uneven samples
    return tokens, targets


def attention(q, k, v):
    """Causal; [B, T, H, D] with K <= H heads of k and v, each shared by H / K neighbouring heads of q."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


class GPT2:
    sizes = dict(vocabulary_size=61, sequence_length=13, width=24, layers=2, heads=3, inner=96)

    def shapes(self):
        s = self.sizes
        w, f = s["width"], s["inner"]
        shapes = {"wte.weight": (s["vocabulary_size"], w), "wpe.weight": (s["sequence_length"], w)}
        for i in range(s["layers"]):
            for name, shape in (
                ("ln_1.weight", (w,)), ("ln_1.bias", (w,)),
                ("attn.c_attn.weight", (3 * w, w)), ("attn.c_attn.bias", (3 * w,)),
                ("attn.c_proj.weight", (w, w)), ("attn.c_proj.bias", (w,)),
                ("ln_2.weight", (w,)), ("ln_2.bias", (w,)),
                ("mlp.c_fc.weight", (f, w)), ("mlp.c_fc.bias", (f,)),
                ("mlp.c_proj.weight", (w, f)), ("mlp.c_proj.bias", (w,)),
            ):
                shapes[f"h.{i}.{name}"] = shape
        shapes["ln_f.weight"] = shapes["ln_f.bias"] = (w,)
        return shapes

    def logits(self, p, tokens):
        s = self.sizes
        layer_norm = lambda x, n: torch.nn.functional.layer_norm(
            x, (s["width"],), p[n + ".weight"], p[n + ".bias"], 1e-5)
        linear = lambda x, n: x @ p[n + ".weight"].T + p[n + ".bias"]
        gelu = lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        x = p["wte.weight"][tokens] + p["wpe.weight"][: tokens.shape[1]]
        for i in range(s["layers"]):
            h = f"h.{i}."
            qkv = linear(layer_norm(x, h + "ln_1"), h + "attn.c_attn")
            q, k, v = (part.unflatten(-1, (s["heads"], -1)) for part in qkv.chunk(3, -1))
            x = x + linear(attention(q, k, v), h + "attn.c_proj")
            x = x + linear(gelu(linear(layer_norm(x, h + "ln_2"), h + "mlp.c_fc")), h + "mlp.c_proj")
        return layer_norm(x, "ln_f") @ p["wte.weight"].T


class Llama:
    sizes = dict(vocabulary_size=53, sequence_length=13, width=24, layers=2, heads=6, key_value_heads=2, inner=40)

    def __init__(self, tied):
        self.tied = tied

    def shapes(self):
        s = self.sizes
        w, f, kv = s["width"], s["inner"], s["width"] // s["heads"] * s["key_value_heads"]
        shapes = {"model.embed_tokens.weight": (s["vocabulary_size"], w)}
        for i in range(s["layers"]):
            for name, shape in (
                ("input_layernorm.weight", (w,)),
                ("self_attn.q_proj.weight", (w, w)), ("self_attn.k_proj.weight", (kv, w)),
                ("self_attn.v_proj.weight", (kv, w)), ("self_attn.o_proj.weight", (w, w)),
                ("post_attention_layernorm.weight", (w,)),
                ("mlp.gate_proj.weight", (f, w)), ("mlp.up_proj.weight", (f, w)), ("mlp.down_proj.weight", (w, f)),
            ):
                shapes[f"model.layers.{i}.{name}"] = shape
        shapes["model.norm.weight"] = (w,)
        if not self.tied:
            shapes["lm_head.weight"] = (s["vocabulary_size"], w)
        return shapes

    def logits(self, p, tokens):
        s = self.sizes
        head_width = s["width"] // s["heads"]
        rms_norm = lambda x, n: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * p[n + ".weight"]
        linear = lambda x, n: x @ p[n + ".weight"].T
        silu = lambda x: x / (1 + torch.exp(-x))
        position = torch.arange(tokens.shape[1], dtype=torch.float64)
        frequency = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
        angle = (position[:, None] * frequency)[:, None, :]  # [T, 1, D / 2]

        def rotated(x):
            a, b = x.chunk(2, -1)
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        x = p["model.embed_tokens.weight"][tokens]
        for i in range(s["layers"]):
            h = f"model.layers.{i}."
            n = rms_norm(x, h + "input_layernorm")
            q, k, v = (linear(n, h + f"self_attn.{c}_proj").unflatten(-1, (-1, head_width)) for c in "qkv")
            x = x + linear(attention(rotated(q), rotated(k), v), h + "self_attn.o_proj")
            n = rms_norm(x, h + "post_attention_layernorm")
            x = x + linear(silu(linear(n, h + "mlp.gate_proj")) * linear(n, h + "mlp.up_proj"), h + "mlp.down_proj")
        return linear(rms_norm(x, "model.norm"), "model.embed_tokens" if self.tied else "lm_head")


def loss_of(model, weights, tokens, targets):
    logits = model.logits(weights, tokens).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")


def write(path, tensors):
    """Per tensor: name (u32 length, bytes), u32 kind (0 fp32, 1 int32, 2 fp64), u32 rank, i64 sizes, values."""
    kinds = {torch.float32: (0, "f"), torch.int32: (1, "i"), torch.float64: (2, "d")}
    with open(path, "wb") as file:
        file.write(b"TSGOLD1\n")
        for name, tensor in tensors.items():
            kind, letter = kinds[tensor.dtype]
            file.write(struct.pack("<I", len(name)) + name.encode())
            file.write(struct.pack(f"<II{tensor.dim()}q", kind, tensor.dim(), *tensor.shape))
            values = tensor.detach().flatten().tolist()
            file.write(struct.pack(f"<{len(values)}{letter}", *values))


def make(model, path):
    weights = weights_of(model.shapes())
    tokens, targets = batch_of(model.sizes["vocabulary_size"])
    out = {"tokens": tokens.int(), "targets": targets.int()}
    count = int((targets != IGNORE).sum())
    for name, weight in weights.items():
        out["weight." + name] = weight.detach().float()
    decayed = [w for w in weights.values() if w.dim() == 2]
    others = [w for w in weights.values() if w.dim() != 2]
    optimizer = torch.optim.AdamW(
        [dict(params=decayed, weight_decay=WEIGHT_DECAY), dict(params=others, weight_decay=0.0)], **ADAMW)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, weights, tokens, targets)
        loss.backward()
        if step == 0:
            out["loss"] = torch.tensor([loss.item(), count], dtype=torch.float64)
            for name, weight in weights.items():
                out["gradient." + name] = weight.grad.float()
        for weight in weights.values():
            weight.grad /= count  # the mean over predicted tokens
        optimizer.step()
    for name, weight in weights.items():
        out["after." + name] = weight.detach().float()
    final = loss_of(model, weights, tokens, targets).item()
    out["final_loss"] = torch.tensor([final, count], dtype=torch.float64)
    write(path, out)
    print(f"{path}: {sum(w.numel() for w in weights.values())} weights, loss {out['loss'][0].item() / count:.6f} "
          f"-> {final / count:.6f} nats per token, {os.path.getsize(path)} bytes")


def print_bf16_distances(model):
    """Gradients with bf16 weights, and with fp32 weights under autocast: the relative distance to those in fp64,
    of the worst tensor and of all together."""
    weights = weights_of(model.shapes())
    tokens, targets = batch_of(model.sizes["vocabulary_size"])
    loss_of(model, weights, tokens, targets).backward()
    distance = lambda a, b: ((a - b).norm() / b.norm()).item()
    for way, dtype in (("bf16", torch.bfloat16), ("autocast", torch.float32)):
        low = {name: w.detach().to(dtype).requires_grad_() for name, w in weights.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
            logits = model.logits(low, tokens).flatten(0, 1)
        torch.nn.functional.cross_entropy(
            logits.float(), targets.flatten(), ignore_index=IGNORE, reduction="sum").backward()
        ours, exact = ([w.grad.double().flatten() for w in of.values()] for of in (low, weights))
        worst, name = max((distance(a, b), name) for a, b, name in zip(ours, exact, weights))
        print(f"{type(model).__name__} {getattr(model, 'tied', '')} {way}: worst {worst:.2e} ({name}), "
              f"all {distance(torch.cat(ours), torch.cat(exact)):.2e}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--bf16"]:
        for model in (GPT2(), Llama(tied=False), Llama(tied=True)):
            print_bf16_distances(model)
        sys.exit()
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    make(GPT2(), os.path.join(folder, "gpt2.bin"))
    make(Llama(tied=False), os.path.join(folder, "llama.bin"))
    make(Llama(tied=True), os.path.join(folder, "llama_tied.bin"))
