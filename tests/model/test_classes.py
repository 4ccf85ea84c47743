"""Parameters of every class with experts of transformers, counted on its meta device, against what its config is read as."""

from __future__ import annotations

from typing import Any

import pytest

from moesim.errors import ModelError
from moesim.model.keys import read_model

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SMALL = {"deepseek_v2": {"num_experts_per_tok": 6}}
APART = {  # share by which the reading is known to differ, and why
    "axk2": 0.02,  # norms with gates of a rank
    "inkling2_text": 0.01,  # learned relative positions
    "inkling2_loop_text": 0.02,  # and gates between passes of the loop
    "zaya": 0.01,  # convolutions over queries and keys, a router of three layers
    "longcat_flash": 0.4,  # the class gives weights to experts that have none
}


@pytest.mark.long
def test_classes_have_as_many_parameters_as_are_read() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    n, wrong = 0, []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        made = _made(name)
        if made is None:
            continue
        keys, wanted = made
        n += 1
        if name == "doge":
            with pytest.raises(ModelError, match="experts of one column"):
                read_model(keys, None, name, name)
        elif (found := read_model(keys, None, name, name).total_params) != pytest.approx(wanted, rel=APART.get(name, 1e-3)):
            wrong.append(f"{name}: {found}, not {wanted}")
    assert not wrong
    assert n >= 50


def _made(name: str) -> tuple[dict[str, Any], int] | None:
    """Make a model of six layers, if it has experts and all sizes; return its keys and parameters."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        keys = CONFIG_MAPPING[name](**SMALL.get(name, {})).to_dict()
        if not any(isinstance(part.get(key), int) for part in (keys, keys.get("text_config") or {}) for key in EXPERTS):
            return None
        few = {"num_hidden_layers": 6} if isinstance(keys.get("num_hidden_layers"), int) and "text_config" not in keys else {}
        config = CONFIG_MAPPING[name](**few, **SMALL.get(name, {}))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # a class without defaults of its sizes
        return None
    buffers = sum(buffer.numel() for key, buffer in model.named_buffers() if key.endswith("bias"))
    return config.to_dict(), sum(weight.numel() for weight in model.parameters()) + buffers
