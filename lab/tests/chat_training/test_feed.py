"""The chat model's training: rows and batches."""

import contextlib
import itertools
import random

import jax
import numpy as np
import pytest

from pensieve_jax import ConfigError
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_lab.chat_training.corpus import Corpus, Weights
from pensieve_lab.chat_training.data import Conversation
from pensieve_lab.chat_training.examples import Example, all_batches
from pensieve_lab.chat_training.feed import Feed
from pensieve_lab.chat_training.step import hidden_states


def numbered_examples(*lengths):
    return [Example(np.full(n, i + 1, np.int32), np.ones(n, np.float32)) for i, n in enumerate(lengths)]


def test_rows_hold_every_conversation_once_and_nothing_is_predicted_across_them():
    lengths = (5, 3, 8, 2, 7, 12)
    rows = list(all_batches(numbered_examples(*lengths), num_rows=2, row_len=8))
    ids = np.concatenate([batch.token_ids.ravel() for batch in rows])
    assert np.bincount(ids, minlength=7)[1:].tolist() == [5, 3, 8, 2, 7, 8]  # the last is cut to a row
    for batch in rows:
        inside = (batch.weights > 0).nonzero()
        assert (batch.targets[inside] == batch.token_ids[inside]).all()
        assert (batch.segments[inside] > 0).all()
        starts = np.diff(batch.segments, prepend=0) != 0
        assert (batch.positions[starts] == 0).all()
        assert (batch.weights > 0).sum() == sum(
            n - 1 for n in np.unique_counts(batch.token_ids[batch.segments > 0]).counts
        )


def numbered_feed(seed=3, **sizes):
    """Seven recorded dialogues of 2 to 8 tokens, numbered from 1; fresh conversations are 3 tokens of 99."""
    fresh = Example(np.full(3, 99, np.int32), np.ones(3, np.float32))
    sizes = {"recorded_per_step": 2, "num_rows": 4, "row_len": 8, "seed": seed} | sizes
    return Feed(numbered_examples(*range(2, 9)), lambda rng: fresh, **sizes)


def test_a_batch_depends_on_the_seed_and_the_step_alone(encoder, talks):
    def feed(seed):
        corpus = Corpus(encoder, talks, talks[:2], Weights(2.0, 0.1))
        size = {"recorded_per_step": 3, "num_rows": 4, "row_len": 400, "seed": seed}
        return Feed(list(corpus.recorded(seed)), corpus.fresh, **size)

    straight = list(itertools.islice(feed(3).batches(0), 7))
    with contextlib.closing(feed(3).batches(4, num_workers=1)) as from_another_process:
        resumed = list(itertools.islice(from_another_process, 3))
    for one, other in zip(straight[4:], resumed, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert not np.array_equal(straight[0].token_ids, next(feed(4).batches(0)).token_ids)


def test_an_epoch_holds_every_recorded_dialogue_once_and_fresh_ones_fill_the_rest():
    seen = []
    for batch in itertools.islice(numbered_feed().batches(0), 7):  # two epochs
        ids = batch.token_ids[batch.segments > 0]
        seen += [i for i in np.unique(ids) if i != 99]
        assert ((batch.segments == 0).sum(axis=1) < 3).all()  # no room for another
    assert sorted(seen) == sorted([*range(1, 8)] * 2)


def test_recorded_dialogues_leave_room_for_facts():
    with pytest.raises(ConfigError, match="--recorded_per_step is 4, but must be at most 3"):
        numbered_feed(recorded_per_step=4)


def test_no_recorded_dialogue_is_lost_for_want_of_room():
    lengths = [8, 1, 1, 1, 8, 8, 1, 1, 1, 1, 1, 1]  # some steps get far more than the mean
    size = {"num_rows": 3, "row_len": 8, "seed": 0}
    fresh = Example(np.full(3, 99, np.int32), np.ones(3, np.float32))
    with pytest.raises(ConfigError, match="--recorded_per_step is 4, but must be at most 3"):
        Feed(numbered_examples(*lengths), lambda rng: fresh, recorded_per_step=4, **size)
    feed = Feed(numbered_examples(*lengths), lambda rng: fresh, recorded_per_step=3, **size)
    seen = [int(i) for batch in itertools.islice(feed.batches(0), 8) for i in np.unique(batch.token_ids)]
    assert sorted(i for i in seen if i not in (0, 99)) == sorted([*range(1, 13)] * 2)


def test_packed_conversations_compute_what_they_do_alone(network, parameters, encoder, talks):
    examples = [
        encoder.encode(Conversation(one.exchanges[:n]), [1.0] * n) for n, one in enumerate(talks[:3], 1)
    ]
    [batch] = all_batches(examples, num_rows=2, row_len=200)
    assert batch.segments.max() > 1

    @jax.jit
    def packed_logits(parameters, batch):
        model = network.model(parameters)
        hidden = hidden_states(model, batch.token_ids, batch.positions, batch.segments)
        return model.compute_logits(hidden).reshape(*batch.token_ids.shape, -1)

    packed = np.asarray(packed_logits(parameters, batch))
    reference = DenseReference(network.model(parameters), min_padded_tokens=256)
    num_compared = 0
    for row, segment in itertools.product(range(2), range(1, 4)):
        where = batch.segments[row] == segment
        if where.any():
            alone = reference.logits(batch.token_ids[row, where])
            np.testing.assert_allclose(packed[row, where], alone, atol=2e-5)
            num_compared += 1
    assert num_compared == len(examples)


def test_replies_count_by_what_they_are_for(encoder, talks):
    corpus = Corpus(encoder, talks, talks[:2], Weights(fact=4.0, talk=0.5))
    assert len(list(corpus.recorded(0))) == 8 + 2
    fresh = [corpus.fresh(random.Random(0)) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *fresh)
    weights = {weight for seed in range(20) for weight in corpus.fresh(random.Random(seed)).weights}
    assert weights == {4.0, 1.0, 0.5, 0.25, 0.125}  # prompts of requests, and of talk; 4 * 0.25 is a reply's
