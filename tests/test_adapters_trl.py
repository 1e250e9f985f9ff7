"TRL's trainers: preferences, and samples that are generated inside of a step."
import math

import pytest
import torch
from ten_classes import same

from esper_nb.guard import GovernorConfig, guard_trainer

STEPS, AT = 60, 43
QUICK = GovernorConfig(snapshot_every=10, probation=10, stop_raises=False)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "few_words")]

@pytest.fixture
def trl(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("datasets", reason="needs datasets")
    return pytest.importorskip("trl", reason="needs trl")

WORDS = ["<p>", "<e>", "<u>", *[chr(97 + i) for i in range(13)]]

def reader():
    "A tokenizer of sixteen words."
    import tokenizers
    import transformers
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({k: i for i, k in enumerate(WORDS)}, "<u>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<p>", eos_token="<e>", unk_token="<u>", padding_side="left")

def network(folder):
    "A small network, in a folder, too, from which the reference model is loaded."
    import transformers
    torch.manual_seed(0)
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=16, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1, pad_token_id=0))
    net.save_pretrained(folder/"start")
    net.config._name_or_path = str(folder/"start") # noqa: SLF001
    return net

def letters(n, length, seed):
    "Lines of letters."
    drawn = torch.randint(3, 16, (n, length), generator=torch.Generator().manual_seed(seed))
    return [" ".join(WORDS[i] for i in row) for row in drawn.tolist()]

def table(columns):
    import datasets
    return datasets.Dataset(datasets.table.InMemoryTable.from_pydict(columns), fingerprint="rows")

class Fault:
    "Comes before step AT, from outside."
    def __init__(self, kind): self.kind = kind
    def __call__(self, model, step):
        if step != AT or self.kind is None: return
        with torch.no_grad():
            weight = model.transformer.h[0].mlp.c_fc.weight
            if self.kind == "nan": weight[0, 0] = math.nan
            if self.kind == "noise":
                for p in model.parameters():
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)), alpha=1.)

def settings(tmp_path, **more):
    return dict(output_dir=str(tmp_path), max_steps=STEPS, report_to=[], logging_steps=5, use_cpu=True, seed=0,
                save_strategy="no", disable_tqdm=True, bf16=False, learning_rate=3e-3) | more

def dpo(trl, tmp_path, **more):
    prompts, good = letters(8 * STEPS, 4, 1), letters(8 * STEPS, 4, 2)
    bad = [" ".join(reversed(line.split())) + " a a" for line in good]
    args = trl.DPOConfig(**settings(tmp_path, per_device_train_batch_size=8, max_length=32) | more)
    data = table(dict(prompt=[f"{p} " for p in prompts], chosen=good, rejected=bad))
    return trl.DPOTrainer(model=network(tmp_path), args=args, processing_class=reader(), train_dataset=data)

def many_a(completions, **_): return [float(line.split().count("a")) for line in completions]

def grpo(trl, tmp_path, **more):
    args = trl.GRPOConfig(**settings(
        tmp_path, per_device_train_batch_size=8, num_generations=4, max_completion_length=6, beta=.04) | more)
    return trl.GRPOTrainer(model=network(tmp_path), args=args, processing_class=reader(), reward_funcs=many_a,
                           train_dataset=table(dict(prompt=letters(8 * STEPS, 4, 1))))

TIMES = ("train_runtime", "step_time", "train_samples_per_second", "train_steps_per_second")

def train(made, guarded, fault):
    "Train; the Governor, and what the log says of which steps."
    import transformers
    class Ruin(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs): fault(made.model, state.global_step)
    made.remove_callback(transformers.PrinterCallback)
    made.add_callback(Ruin())
    guard = guard_trainer(made, None, QUICK) if guarded else None
    made.train()
    rows = {x["step"]: {k: v for k, v in x.items() if k not in TIMES} for x in made.state.log_history if "loss" in x}
    return made.model, guard and guard.governor, rows

def pair(trl, tmp_path, way, kind):
    "The same run alone and well, and guarded with a fault."
    return [train(WAYS[way](trl, tmp_path), g, Fault(kind if g else None)) for g in (False, True)]

WAYS = {
    "dpo": dpo,
    "dpo accumulating": lambda *a: dpo(*a, gradient_accumulation_steps=2, per_device_train_batch_size=4),
    "grpo": grpo,
    "grpo reusing": lambda *a: grpo(*a, num_iterations=2, steps_per_generation=2),
    "grpo accumulating": lambda *a: grpo(*a, gradient_accumulation_steps=2, per_device_train_batch_size=4)}

@pytest.mark.parametrize("way", WAYS)
def test_a_healthy_run_is_as_if_nobody_watched(trl, way, tmp_path):
    alone, guarded = pair(trl, tmp_path, way, None)
    governor = guarded[1]
    assert governor.repairs.dry.exact, governor.repairs.dry.why
    assert same(alone[0], guarded[0]) and str(alone[2]) == str(guarded[2]) # as text, where NaN is NaN
    assert list(guarded[2]) == list(range(5, STEPS + 1, 5)) and governor.watched == STEPS and not governor.reports

@pytest.mark.parametrize("kind", ["nan", "noise"])
@pytest.mark.parametrize("way", WAYS)
def test_a_ruined_run_is_undone_and_goes_on(trl, way, kind, tmp_path):
    alone, guarded = pair(trl, tmp_path, way, kind)
    governor = guarded[1]
    assert [(r.action, r.cause) for r in governor.reports] == [("rollback", "external")], [*map(str, governor.reports)]
    assert governor.reports[0].redone and governor.watched == STEPS
    assert all(p.isfinite().all() for p in guarded[0].parameters())
    if "dpo" in way: assert same(alone[0], guarded[0]) # a sampler that fails draws fewer numbers than one that works
    last = governor.reports[0].batch // 5 * 5 + 5 # the line of the log that was due next
    for step in range(5, AT // 5 * 5 + 1, 5): assert str(alone[2][step]) == str(guarded[2][step])
    for step, row in guarded[2].items():
        assert row.keys() == alone[2][step].keys()
        if step >= last: assert math.isfinite(row["loss"]) and 1. < row["entropy"] < math.log(16) + .01
        if step >= last and "dpo" in way: assert row["loss"] == pytest.approx(alone[2][step]["loss"], rel=1e-4)
        if step > last and "dpo" in way: assert str(row) == str(alone[2][step])

def test_a_reference_that_follows_the_model_is_named_and_no_cause_is_given(trl, tmp_path):
    made = dpo(trl, tmp_path, sync_ref_model=True, ref_model_sync_steps=8)
    _, governor, _ = train(made, True, Fault("nan"))
    assert [(r.action, r.cause) for r in governor.reports] == [("rollback", "unknown")]
    assert not governor.repairs.dry.exact and "ref_model" in governor.repairs.dry.why

def test_a_reward_that_draws_from_the_operating_system_gives_no_cause(trl, tmp_path):
    import random
    drawn = random.SystemRandom()
    def noisy(completions, **_): return [drawn.random() for _ in completions]
    made = trl.GRPOTrainer(
        model=network(tmp_path), args=trl.GRPOConfig(**settings(
            tmp_path, per_device_train_batch_size=8, num_generations=4, max_completion_length=6)),
        processing_class=reader(), reward_funcs=noisy, train_dataset=table(dict(prompt=letters(8 * STEPS, 4, 1))))
    _, governor, _ = train(made, True, Fault("nan"))
    assert not governor.repairs.dry.exact and governor.repairs.dry.why
    assert [(r.action, r.cause) for r in governor.reports] == [("rollback", "unknown")]
