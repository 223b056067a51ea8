"""Peers and models that do not fit, and requests that cannot be: each is refused by name, and others are served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from kvferry.connector.geometry import model_identity as module
from kvferry.connector.geometry.model_identity import model_identity, weights_fact
from kvferry.connector.geometry.token_sharding import TokenSharding
from kvferry.connector.pages.caches import PageBox, RankCaches
from kvferry.connector.pages.rank_context import check_model
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import PeerEngine
from kvferry.transport.errors import (
    ConfigError,
    GeometryError,
    IncompatiblePeerError,
    PlaneUnavailableError,
    TransportError,
)
from tests.handover.prefilling import PrefillingEngine
from tests.handover.scenario import (
    OURS,
    SMALL,
    THEIRS,
    TOKENS,
    RankGroup,
    another_works,
    begin,
    ended,
    is_wiped,
    load_from,
)
from tests.support.inside import early_releases, sends_of
from tests.support.ranks import Rank, grant, load_plan, peer, reason_of, wait
from tests.transport.control_ends import Dialed

PUSHES = pytest.mark.parametrize("plane", ["shm", "tcp", "zmq", pytest.param("ucx", marks=pytest.mark.ucx)])


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ({"model": {"architectures": "Other"}}, "architectures"),
        ({"total_heads": 8}, "total_heads"),
    ],
)
def test_another_model_or_geometry_is_refused_by_name(
    group: RankGroup, theirs: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = group.pair(of_p=theirs)
    with caplog.at_level("WARNING", "vllm.kvferry"):
        begin(p, d)
        assert not ended(p, d)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "vllm.kvferry.link"]
    assert "peer refused: " in line and named in line and "\n" not in line


def test_a_d_that_does_not_fit_releases_a_prompt_that_p_computes(group: RankGroup) -> None:
    """It is no garbage, and P does not hold the blocks for it."""
    p, d = group.pair(of_p={"model": {"architectures": "Other"}})
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin()
    engine.load(d, OURS)
    assert wait(lambda: d.failed == {"req-d"} and bool(early_releases(p)), [p, d]) and reason_of(d) == "incompatible"
    engine.finish()
    assert wait(lambda: p.sent == {"req-p"}, [p, d])
    assert p.counts("num_dropped_messages") == {}


def test_another_protocol_version_is_refused_by_name(group: RankGroup) -> None:
    p = group.rank()
    connection = Dialed(p.address.port)
    connection.send([messages.MAGIC, (9).to_bytes(2, "big"), b"whatever version 9 says"])
    answers: list[list[bytes]] = []
    assert wait(lambda: bool(answers.extend(connection.receive()) or answers), [p])
    connection.close()
    refused = messages.Refused(field="protocol version", ours=str(messages.PROTOCOL_VERSION), theirs="9")
    assert messages.decode_reply(answers[0]) == refused


@pytest.mark.parametrize("plane", ["cuda_ipc", "ucx"])
def test_a_plane_that_a_rank_cannot_have(group: RankGroup, monkeypatch: pytest.MonkeyPatch, plane: str) -> None:
    def missing(*_: object) -> None:
        raise PlaneUnavailableError("ucxx is not installed")

    monkeypatch.setattr("kvferry.transport.planes.ucx.UcxPlane.__init__", missing)
    with pytest.raises(ConfigError, match=rf"^plane: '{plane}' cannot be used: [^\n]*; expected one of auto, ") as e:
        group.rank(plane=plane)
    assert "host memory" in str(e.value) or "ucxx is not installed" in str(e.value)


def test_a_plane_that_p_has_no_room_on_is_passed_over(p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(payload: bytes) -> None:
        raise TransportError("staging memory is used up")

    for name in ("cma", "shm"):
        monkeypatch.setattr(p.context.plane(name), "accept", full)
    another_works(p, d)
    assert d.plane not in ("cma", "shm")


def test_blocks_out_of_range_fail_the_one_request(p: Rank, d: Rank) -> None:
    begin(p, d, ours=[999] * 7)
    assert not ended(p, d)
    another_works(p, d)


def none_left(p: Rank, d: Rank) -> bool:
    return wait(lambda: not d.consumer.reads.by_number and not sends_of(p).turns, [p, d])


@PUSHES
def test_a_token_that_no_message_holds(group: RankGroup, plane: str) -> None:
    """D finds out after it has asked: it says what to do, and neither side keeps anything of the read."""
    p, d = group.pair(plane=plane, content=8192, **SMALL)
    begin(p, d)
    assert not ended(p, d) and reason_of(d) == "incompatible"
    assert none_left(p, d)


@PUSHES
def test_a_read_that_d_cannot_cut(group: RankGroup, monkeypatch: pytest.MonkeyPatch, plane: str) -> None:
    """By then it has been asked for, and P sends: what comes is dropped, and nothing is waited for."""
    p, d = group.pair(plane=plane, content=128, **SMALL)
    cut = RankCaches.cut

    def cut_once(caches: RankCaches, *args: Any, **kwargs: Any) -> Iterator[PageBox]:
        parts = cut(caches, *args, **kwargs)
        if caches is d.context.caches:
            yield next(parts)
            raise GeometryError("it is cut no further")
        yield from parts

    with monkeypatch.context() as patch:
        patch.setattr(RankCaches, "cut", cut_once)
        begin(p, d)
        assert not ended(p, d) and none_left(p, d)
    assert reason_of(d) == "incompatible"
    another_works(p, d)


def test_a_read_beyond_the_prompt_is_denied(p: Rank, d: Rank) -> None:
    token = grant([p], "req-p", THEIRS, 50)
    load_from(p, d, token)
    assert not ended(p, d)
    assert is_wiped(d, -1)
    another_works(p, d)


@pytest.mark.parametrize(("side", "kind", "name"), [("d", "internal", "unpack"), ("p", "data", "pack")])
def test_an_error_of_the_copy_is_one_requests_failure(group: RankGroup, side: str, kind: str, name: str) -> None:
    p, d = group.pair(plane="shm")
    caches, real = (d if side == "d" else p).context.caches, getattr(RankCaches, name)

    def planted(self: RankCaches, *args: Any, **more: Any) -> Any:
        if self is caches:
            raise RuntimeError("planted")
        return real(self, *args, **more)

    with mock.patch.object(RankCaches, name, planted):
        begin(p, d)
        assert not ended(p, d) and reason_of(d) == kind
    another_works(p, d)


TWO = TokenSharding(2, 16)


def loads(name: str, d: Rank, p: list[Rank], engine: PeerEngine) -> bool:
    """Whether a load succeeds."""
    token = grant(p, f"{name}-p", THEIRS, TOKENS)
    d.worker.post(load_plan(name, token, engine, OURS, 0, TOKENS))
    assert wait(lambda: name in d.received, [d, *p])
    return name not in d.failed


def test_p_said_that_ranks_share_tokens_out_which_hold_other_heads(group: RankGroup) -> None:
    """A rank of D whose tokens then nobody has must not take that for nothing to load."""
    p = [group.rank(tp_rank=n, tp_size=2, total_heads=2) for n in range(2)]
    d = group.rank(engine_id="engine-d", tp_rank=1, tp_size=4, total_heads=2, sharding=TWO)
    assert loads("told-right", d, p, peer(p))
    assert not loads("told-wrong", d, p, replace(peer(p), shardings=(TWO,)))


OLD: dict[str, Any] = {  # transformers 4
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 300, "intermediate_size": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "rope_scaling": None, "max_position_embeddings": 4096, "attention_bias": False,
}  # fmt: skip
NEW: dict[str, Any] = {  # transformers 5
    **{name: value for name, value in OLD.items() if name not in ("rope_theta", "rope_scaling")},
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000}, "head_dim": 8, "attention_bias": None,
    "layer_types": ["full_attention"] * 4,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [1.5] * 48}


def facts(*changes: dict[str, Any]) -> dict[str, str]:
    """Of a configuration. ``engine``: what stands outside of it."""
    config = {name: value for change in changes for name, value in change.items()}
    engine = {"quantization": None, "max_model_len": 2048, **config.pop("engine", {})}
    hf_config = SimpleNamespace(**config)
    return model_identity(hf_config, hf_config, **engine)


def weights(digest: str, name: str = "base, revision 1", **engine: Any) -> dict[str, Any]:
    return {"engine": {"weights": weights_fact(digest, name), **engine}}


def awq(**changes: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, **changes}}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((OLD,), (NEW,)),
        ((OLD,), (OLD, {"engine": {"max_model_len": 99}})),
        ((OLD,), (OLD, {"max_position_embeddings": 131072})),
        ((OLD,), (OLD, {"_name_or_path": "/models/x", "transformers_version": "4.57", "torch_dtype": "float16"})),
        ((OLD,), (OLD, {"dtype": "bfloat16", "tie_word_embeddings": True, "use_cache": False, "eos_token_id": 7})),
        (
            (OLD, {"rope_scaling": {"type": "yarn", **YARN}}),
            (NEW, {"rope_parameters": {"rope_type": "yarn", "type": "yarn", "rope_theta": 5e5, **YARN}}),
        ),
        (
            (OLD, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
            (NEW, {"rope_parameters": {
                "rope_type": "llama3", "factor": 8, "rope_theta": 5e5, "original_max_position_embeddings": 4096}}),
        ),
        (
            (OLD, {"rope_scaling": {"type": "su", **FACTORS}, "original_max_position_embeddings": 1024}),
            (NEW, {"rope_parameters": {
                "rope_type": "longrope", "rope_theta": 5e5, "original_max_position_embeddings": 1024, **FACTORS}}),
        ),
        ((OLD, {"partial_rotary_factor": 0.5}), (NEW, {"rope_parameters": {
            "rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 0.5}})),
        (
            (OLD, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}),
            (NEW, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": (16, 24, 24)}}),
        ),
        (
            (OLD, {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
            (NEW, {"rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
                "full_attention": {"rope_type": "default", "rope_theta": 1000000}}}),
        ),
        ((NEW,), (NEW, {"rope_parameters": {"full_attention": NEW["rope_parameters"]}})),
        ((OLD, {"sliding_window": 4096, "use_sliding_window": False}), (OLD, {"sliding_window": None})),
        ((OLD, awq(), {"engine": {"quantization": "awq"}}), (OLD, awq(), {"engine": {"quantization": "awq_marlin"}})),
        ((OLD, awq(version="gemm")), (OLD, {"quantization_config": {
            "quant_method": "awq_marlin", "w_bit": 4, "q_group_size": 128, "zero_point": True}})),
        ((OLD, {"engine": {"quantization": "fp8"}}), (OLD, {"engine": {"quantization": "fp8"}})),
        ((OLD, {"engine": {"tag": "v2"}}), (NEW, {"engine": {"tag": "v2"}})),
        ((OLD, weights("1")), (OLD, weights("1", "elsewhere"))),
        ((OLD, weights("1")), (OLD, weights(""))),
        ((OLD, weights("")), (OLD, weights(""))),
        ((OLD, awq(), weights("1", tag="v2")), (OLD, weights("2", "elsewhere", tag="v2"))),
    ],
)  # fmt: skip
def test_the_same_model_passes(theirs: tuple[dict[str, Any], ...], ours: tuple[dict[str, Any], ...]) -> None:
    check_model(facts(*ours), facts(*theirs))


def layer_types(full: int) -> dict[str, Any]:
    return {"layer_types": ["full_attention" if n == full else "sliding_attention" for n in range(4)]}


@pytest.mark.parametrize(
    ("theirs", "ours", "line"),
    [
        ({"architectures": ["Other"]}, {}, "architectures differs, ours is LlamaForCausalLM, the peer's is Other"),
        ({"num_hidden_layers": 5}, {}, "num_hidden_layers differs, ours is 4, the peer's is 5"),
        ({"hidden_size": 128, "head_dim": 8}, {}, "hidden_size differs, ours is 64, the peer's is 128"),
        ({"num_key_value_heads": 2}, {}, "num_key_value_heads differs, ours is 4, the peer's is 2"),
        ({"head_dim": 16}, {}, "head_dim differs, ours is 8, the peer's is 16"),
        ({"vocab_size": 301}, {}, "vocab_size differs, ours is 300, the peer's is 301"),
        ({"rms_norm_eps": 1e-6}, {}, "rms_norm_eps differs, ours is 1e-05, the peer's is 1e-06"),
        ({"attention_bias": True}, {}, "attention_bias differs, ours is unset, the peer's is true"),
        ({"sliding_window": 4096}, {}, "sliding_window differs, ours is unset, the peer's is 4096"),
        (layer_types(3), layer_types(2),
         "layer_types differs, ours is 2xsliding_attention 1xfull_attention 1xsliding_attention, the peer's is 3x"),
        ({"attn_logit_softcapping": 50.0}, {}, "attn_logit_softcapping differs, ours is unset, the peer's is 50"),
        ({"query_pre_attn_scalar": 256}, {"query_pre_attn_scalar": 224}, "query_pre_attn_scalar differs, ours is 224"),
        ({"qk_norm": True}, {}, "qk_norm differs"),
        ({"num_experts_per_tok": 2}, {"num_experts_per_tok": 4}, "num_experts_per_tok differs, ours is 4"),
        ({"rope_theta": 1e4}, {},
         'rope differs, ours is {"rope_theta": 500000, "rope_type": "default"}, the peer\'s is {"rope_theta": 10000,'),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {}, "rope differs"),
        ({"rope_scaling": {"type": "yarn", **YARN}}, {"rope_scaling": {"type": "yarn", **YARN, "factor": 8.0}},
         "rope differs"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8192},
         {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope differs"),
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, {"rope_theta": 1e6, "rope_local_base_freq": 2e4},
         "rope differs"),
        ({"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.5}, "rope differs"),
        ({"rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 1024},
         {"rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 1024,
          "engine": {"max_model_len": 1024}}, "rope differs"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [*range(300), 1]}},
         {"rope_scaling": {"type": "longrope", "long_factor": [*range(300), 2]}}, "rope differs"),
        (awq(), {}, "quantization differs, ours is unset, the peer's is awq"),
        ({"engine": {"quantization": "fp8"}}, {}, "quantization differs, ours is unset, the peer's is fp8"),
        (awq(), awq(bits=8), "quantization bits differs, ours is 8, the peer's is 4"),
        (awq(), awq(group_size=64), "quantization group_size differs, ours is 64, the peer's is 128"),
        (awq(modules_to_not_convert=["a"]), awq(modules_to_not_convert=["b"]),
         'quantization layers_left_out differs, ours is ["b"]'),
        ({"quantization_config": {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}},
         {"quantization_config": {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}},
         "quantization algorithm differs, ours is NVFP4, the peer's is FP8"),
        ({"engine": {"tag": "base"}}, {"engine": {"tag": "tuned"}},
         "model_tag differs, ours is tuned, the peer's is base"),
        ({"engine": {"tag": "base"}}, {}, "model_tag differs, ours is unset, the peer's is base"),
        (weights("1", tag="base"), weights("1"), "model_tag differs, ours is unset, the peer's is base"),
        (weights("1", "tuned, revision 2"), weights("3"),
         "weights digest differs, ours is 3 of base, revision 1, the peer's is 1 of tuned, revision 2; to hand over "
         "all the same, set one model_tag on both engines"),
        (weights("", "tuned, revision 2"), weights("3"), "weights digest differs, ours is 3 of base, revision 1, the "
         "peer's is unknown of tuned, revision 2; to"),
        (weights("", "tuned"), weights(""), "weights digest differs, ours is unknown of base, revision 1, the peer's"),
        ({}, weights("3"), "weights digest differs, ours is 3 of base, revision 1, the peer's is unset; to"),
    ],
)  # fmt: skip
def test_another_model_is_refused_by_name(theirs: dict[str, Any], ours: dict[str, Any], line: str) -> None:
    with pytest.raises(IncompatiblePeerError, match=rf"^peer refused: {re.escape(line)}[^\n]*$"):
        check_model(facts(OLD, ours), facts(OLD, theirs))


class LayersThatDiffer(SimpleNamespace):
    """As transformers 5 has a model whose layers differ: it refuses to name one value for all of them."""

    @property
    def head_dim(self) -> int:
        raise RuntimeError("'head_dim' is a per-layer attribute and may vary across layers")


def test_values_that_differ_from_layer_to_layer_are_facts() -> None:
    def of(*head_dims: int) -> dict[str, str]:
        layers = [SimpleNamespace(head_dim=size) for size in head_dims]
        config = LayersThatDiffer(**OLD, per_layer_config=layers)
        return model_identity(config, config, quantization=None, max_model_len=2048)

    check_model(of(32, 64), of(32, 64))
    with pytest.raises(IncompatiblePeerError, match=r"head_dim differs, ours is \[32, 64\], the peer's is \[64, 32\]"):
        check_model(of(32, 64), of(64, 32))


def test_every_fact_there_is_fits_into_a_message(group: RankGroup) -> None:
    """However long the values, whatever is in them."""
    every: dict[str, Any] = {name: f"line\n\u2028 {name} " * 400 for name in module.PLAIN}
    every |= {
        "rope_scaling": {"rope_type": "yarn", "long": "x" * 5000},
        "layer_types": [f"kind {n}" for n in range(900)],
        "quantization_config": {name: "y" * 3000 for names in module.QUANTIZATION.values() for name in names},
        "architectures": ["\x1b[1m" * 600], "head_dim": 8, "sliding_window": 9,
        **weights("3", "long\u2028" * 300, quantization="fp8"),
    }  # fmt: skip
    model = facts(OLD, every) | facts({"engine": {"tag": "t"}})
    assert {"rope", "quantization", "model_tag", "weights digest", "no_rope_layers", "layer_types"} < set(model)
    another_works(*group.pair(model=model))
