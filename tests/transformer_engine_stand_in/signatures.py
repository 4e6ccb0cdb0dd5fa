"""Signatures of what the stand-in stands for, read from Transformer Engine's sources without importing them.

python signatures.py CHECKOUT v2.9 release_v2.12 > signatures.json     any git revisions of a clone
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys

FILES = {
    "Linear": "module/linear.py",
    "LayerNormLinear": "module/layernorm_linear.py",
    "GroupedLinear": "module/grouped_linear.py",
    "RMSNorm": "module/rmsnorm.py",
    "DotProductAttention": "attention/dot_product_attention/dot_product_attention.py",
    "FusedAdam": "optimizers/fused_adam.py",
    "apply_rotary_pos_emb": "attention/rope.py",
    "moe_permute": "permutation.py",
    "moe_permute_with_probs": "permutation.py",
    "moe_unpermute": "permutation.py",
    "moe_sort_chunks_by_index": "permutation.py",
    "moe_sort_chunks_by_index_with_probs": "permutation.py",
    "get_dummy_wgrad": "module/base.py",
}


def signatures(name: str, source: str) -> dict[str, list[str]]:
    """Names of the parameters, in order, of a function or of a class's `__init__` and `forward`."""
    found = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
    )
    functions = [found] if isinstance(found, ast.FunctionDef) else [n for n in found.body if hasattr(n, "args")]
    named = {f"{name}.{f.name}" if f is not found else name: f.args for f in functions}
    wanted = {name, f"{name}.__init__", f"{name}.forward"}
    return {
        key: [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs) if a.arg not in ("self", "ctx")]
        for key, args in named.items()
        if key in wanted
    }


def main(checkout: str, *revisions: str) -> None:
    table: dict[str, dict[str, list[str]]] = {}
    for revision in revisions:
        own = table.setdefault(revision, {})
        for name, file in FILES.items():
            shown = f"{revision}:transformer_engine/pytorch/{file}"
            source = subprocess.run(
                ["git", "-C", checkout, "show", shown], check=True, capture_output=True, text=True
            ).stdout
            own |= signatures(name, source)
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
