"""What only a GPU can show of serving: the same tokens when the steps are replays, nothing lost, nothing leaked."""

import time

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
from alone import alone, prompts_of  # noqa: E402

from labkit import ReplayError, architectures, batching, decode, serving  # noqa: E402


class Clock:
    """The time since it was made; waiting is skipped over."""

    def __init__(self):
        self.began = time.perf_counter()

    def now(self):
        return time.perf_counter() - self.began

    def wait(self, until):
        self.began -= max(0.0, until - self.now())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3_text", "qwen3", "opt"])
def test_replayed_steps_give_each_request_the_tokens_it_gets_alone(name):
    model = architectures.tiny_model(name, "cuda")
    decoder = serving.BatchedDecoder(model, 40, 6, [1, 2, 4])
    trace = batching.poisson_trace(2000, 24, (3, 14), (1, 20), seed=3)
    prompts = prompts_of(trace, "cuda")
    served = batching.serve(decoder, trace, prompts, Clock())
    assert [one.tokens for one in served] == [alone(model, ids, r.output_tokens) for r, ids in zip(trace, prompts)]
    assert {replayed for _, _, replayed in decoder.steps} == {True, False}  # above the largest size a step runs eagerly
    assert all(replayed == (size <= 4) for _, size, replayed in decoder.steps)


def test_a_thousand_arrivals_are_all_served_by_replays_each_with_its_own_tokens():
    model = architectures.tiny_model("llama", "cuda")
    decoder, single = serving.BatchedDecoder(model, 12, 16, batching.powers_of_two(16)), decode.GraphedDecoder(model, 12)
    trace = batching.poisson_trace(3000, 1000, (1, 4), (1, 8), seed=7)
    prompts = prompts_of(trace, "cuda")
    served = batching.serve(decoder, trace, prompts, Clock())
    assert not decoder.running and [one.tokens for one in served] == [
        single.generate(ids[None], r.output_tokens, eos_token_id=())[0].tolist() for r, ids in zip(trace, prompts)]
    assert batching.summary(served, decoder.steps)["replayed_share"] == 1


def test_what_stands_in_padding_rows_reaches_no_request():
    model = architectures.tiny_model("llama", "cuda")
    decoder, [ids] = serving.BatchedDecoder(model, 32, 4, [4]), prompts_of(batching.poisson_trace(1, 1, (6, 6)), "cuda")
    tokens = [decoder.join(ids)]
    with torch.inference_mode():
        for buffer in decoder.kept:
            buffer[1:] = float("nan")
    tokens += [decoder.advance()[0] for _ in range(8)]
    assert tokens == alone(model, ids, 9) and decoder.places.tolist() == [14, 0, 0, 0]


def test_what_a_request_left_in_its_row_does_not_reach_the_next_one():
    model = architectures.tiny_model("llama", "cuda")
    decoder, [ids] = serving.BatchedDecoder(model, 32, 4, [1, 2, 4]), prompts_of(batching.poisson_trace(1, 1, (6, 6)), "cuda")
    decoder.join(ids), decoder.join(ids)
    with torch.inference_mode():
        for buffer in decoder.kept:
            buffer.fill_(float("nan"))
    decoder.leave(0), decoder.leave(0)
    assert [decoder.join(ids), *(decoder.advance()[0] for _ in range(8))] == alone(model, ids, 9)


def test_a_replay_leaves_its_logits_where_the_proof_reads_them_and_hands_nothing_out():
    model = architectures.tiny_model("llama", "cuda")
    decoder, [ids] = serving.BatchedDecoder(model, 32, 4, [1, 4]), prompts_of(batching.poisson_trace(1, 1, (6, 6)), "cuda")
    assert not any(graph.outputs for graph in decoder.graphs.values())
    for rows in (1, 3):
        while len(decoder.running) < rows:
            decoder.join(ids)
        with torch.inference_mode():
            for _ in range(3):
                decoder.logits.fill_(float("nan"))
                logits = decoder._advance()[:rows]
                assert torch.equal(logits.argmax(-1), decoder.tokens[:rows, 0]) and logits.isfinite().all()


def test_sizes_share_one_pool_and_moved_weights_are_noticed():
    model = architectures.tiny_model("llama", "cuda")
    decoder, [ids] = serving.BatchedDecoder(model, 32, 4, [1, 2, 4]), prompts_of(batching.poisson_trace(1, 1, (6, 6)), "cuda")
    assert len({graph.pool for graph in decoder.graphs.values()}) == 1 and decoder.pool_bytes and decoder.capture_seconds > 0
    decoder.join(ids), decoder.advance()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    decoder.leave(0), decoder.join(ids)
    with pytest.raises(ReplayError):
        decoder.advance()
