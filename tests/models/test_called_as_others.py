"""What transformers' users and other libraries do with a Llama, done with each looped model: it is
right, or refused by name. Every row is tried on a Llama too, which says that it is supported."""

import copy
import io
import pickle
from contextlib import redirect_stdout
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version

pytest.importorskip("transformers")

import transformers
from families_of_transformers import FAMILIES, GREEDY, greedy, ids, make
from ouro_models import checkpoint
from transformers import (
    AutoTokenizer,
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    TextStreamer,
    Trainer,
    TrainingArguments,
    WatermarkingConfig,
    pipeline,
)

from stars_fast.models.huginn import HuginnCache
from stars_fast.models.looped_decoder import LoopedDecoderCache
from stars_fast.models.ouro import OuroCache, count_turns

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
# A Llama has its norms and softmaxes in fp32 whatever its dtype: what differs by a last bit in
# fp64 before them does so in fp32 behind them; less where the logits are the same.
ANOTHER_WAY = {"rtol": 1e-5, "atol": 1e-5}
ONE_PASS = {"rtol": 1e-6, "atol": 1e-6}
MODELS = ["llama", *FAMILIES]
LAYERS_KEEP_THEIR_CACHE = Version(transformers.__version__) >= Version("5.24")
"""With gradient checkpointing and without gradients; in 5.5 those of a Llama don't."""
RIGHT = {}
REFUSED = {}


def right(function):
    """A row of the table: what it asserts holds for all models."""
    RIGHT[function.__name__] = function
    return function


def refused(kind, message):
    """A row of the table: it holds for a Llama, and a looped model raises."""

    def note(function):
        REFUSED[function.__name__] = function, kind, message
        return function

    return note


def tokenizer():
    return AutoTokenizer.from_pretrained(checkpoint())


def cache_of(output):
    return output["cache"] if "cache" in output else output["past_key_values"]


def by_hand(model, prompt, new=5):
    """Greedy decoding without `generate`, and without a cache."""
    for _ in range(new):
        best = model(prompt, use_cache=False).logits[:, -1].argmax(-1)
        prompt = torch.cat([prompt, best[:, None]], 1)
    return prompt


# -- decoding


@right
def decodes_as_by_hand(model):
    for use_cache in (True, False):
        assert torch.equal(greedy(model, ids(2), use_cache=use_cache), by_hand(model, ids(2)))


@right
def decodes_left_padded_prompts_as_alone(model):
    prompt = F.pad(ids(), (3, 0))
    mask = (torch.arange(10) >= 3).long()[None]
    assert torch.equal(greedy(model, prompt, attention_mask=mask)[:, 3:], greedy(model, ids()))


@right
def decodes_from_embeddings(model):
    embeds = model.get_input_embeddings()(ids())
    if hasattr(model, "embed"):  # Huginn's are scaled where they come in
        assert model.config.init_values["embed_scale"] != 1
    expected = greedy(model, ids())
    assert torch.equal(greedy(model, inputs_embeds=embeds), expected[:, 7:])
    assert torch.equal(greedy(model, ids(), inputs_embeds=embeds), expected)


@right
def searches_beams(model):
    found = greedy(model, ids(2), num_beams=3, num_return_sequences=2)
    assert torch.equal(found, greedy(model, ids(2), num_beams=3, num_return_sequences=2,
                                     use_cache=False))  # fmt: skip
    assert len(found) == 4
    sampled = greedy(model, ids(), num_beams=2, do_sample=True)
    assert sampled.shape == (1, 12)


@right
def scores_of_beams_are_those_of_the_logits(model):
    out = greedy(
        model, ids(), num_beams=2, return_dict_in_generate=True, output_scores=True,
        length_penalty=0.0,
    )  # fmt: skip
    each = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    logits = model(out.sequences).logits[:, 6:-1].log_softmax(-1)
    expected = logits.gather(2, out.sequences[:, 7:, None]).squeeze(2)
    torch.testing.assert_close(each, expected.to(each.dtype), **ANOTHER_WAY)


@right
def samples_several(model):
    torch.manual_seed(0)
    options = {"do_sample": True, "num_return_sequences": 3, "top_k": 5, "top_p": 0.9}
    found = greedy(model, ids(), **options)
    assert found.shape == (3, 12)
    best = model(ids()).logits[0, -1].topk(5).indices.tolist()
    assert set(found[:, 7].tolist()) <= set(best)


@right
def stops_at_strings(model):
    words = tokenizer()
    whole = greedy(model, ids(), max_new_tokens=12)[0]
    # Bytes of letters beyond ASCII are no string by themselves.
    place = next(i for i in range(8, 19) if words.decode(whole[i : i + 1]).isascii())
    stop = words.decode(whole[place : place + 1])
    found = greedy(model, ids(), max_new_tokens=12, stop_strings=[stop], tokenizer=words)[0]
    assert 8 <= len(found) <= place + 1 < len(whole)
    assert torch.equal(found, whole[: len(found)])
    never = greedy(model, ids(), max_new_tokens=12, stop_strings=["~" * 9], tokenizer=words)[0]
    assert torch.equal(never, whole)
    with pytest.raises(ValueError, match="tokenizer"):
        greedy(model, ids(), stop_strings=[stop])


@right
def streams(model):
    said = io.StringIO()
    with redirect_stdout(said):
        out = greedy(model, ids(), streamer=TextStreamer(tokenizer(), skip_prompt=True))
    assert said.getvalue().strip() == tokenizer().decode(out[0, 7:]).strip()


@right
def obeys_processors(model):
    out = greedy(model, ids(), prefix_allowed_tokens_fn=lambda row, tokens: [5, 6])
    assert set(out[0, 7:].tolist()) <= {5, 6}
    first = int(greedy(model, ids())[0, 7])
    out = greedy(model, ids(), bad_words_ids=[[first]], repetition_penalty=1.3, min_new_tokens=2)
    assert first not in out[0, 7:].tolist()
    assert greedy(model, ids(), forced_eos_token_id=9)[0, -1] == 9
    greedy(model, ids(), watermarking_config=WatermarkingConfig(bias=2.0))


@right
def guides_by_a_negative_prompt(model):
    plain = model(ids()).logits[:, -1].log_softmax(-1)
    less = model(ids()[:, -1:]).logits[:, -1].log_softmax(-1)
    expected = (2.0 * (plain - less) + less).argmax(-1)
    out = greedy(model, ids(), guidance_scale=2.0, max_new_tokens=1)
    assert torch.equal(out[:, 7], expected)


@right
def looks_drafts_up_in_the_prompt(model):
    prompt = ids().repeat(1, 3)
    ends = {"eos_token_id": 1}  # transformers 5.5 wants one
    expected = greedy(model, prompt, **ends)
    assert torch.equal(greedy(model, prompt, prompt_lookup_num_tokens=3, **ends), expected)


@right
def is_helped_by_a_llama_and_helps_it(model):
    llama = make("llama")
    assert torch.equal(greedy(model, ids(), assistant_model=llama), greedy(model, ids()))
    assert torch.equal(greedy(llama, ids(), assistant_model=model), greedy(llama, ids()))
    greedy(model, ids(), assistant_model=llama, do_sample=True)


@right
def drafts_by_an_early_exit(model):
    assert torch.equal(greedy(model, ids(), assistant_early_exit=1), greedy(model, ids()))


@right
def reads_the_prompt_in_chunks(model):
    assert torch.equal(greedy(model, ids(), prefill_chunk_size=3), greedy(model, ids()))


@right
def runs_a_loop_of_the_callers(model):
    def mine(model, input_ids, **options):
        return model._sample(input_ids, **options)

    assert torch.equal(greedy(model, ids(), custom_generate=mine), greedy(model, ids()))


@right
def goes_on_from_the_cache_of_a_generation(model):
    first = greedy(model, ids(), return_dict_in_generate=True)
    held = {"past_key_values": cache_of(first)}
    assert torch.equal(
        greedy(model, first.sequences, **held), greedy(model, ids(), max_new_tokens=10)
    )


@right
def gives_scores_logits_and_states(model):
    out = greedy(
        model, ids(), return_dict_in_generate=True, output_scores=True, output_logits=True,
        output_hidden_states=True,
    )  # fmt: skip
    assert [len(out[name]) for name in ("scores", "logits", "hidden_states")] == [5, 5, 5]
    torch.testing.assert_close(
        out.logits[0], model(ids()).logits[:, -1], check_dtype=False, **ANOTHER_WAY
    )
    assert [step[-1].shape[1] for step in out.hidden_states] == [7, 1, 1, 1, 1]


@right
def generates_in_training_too(model):
    expected = greedy(model, ids())
    model.train()
    assert torch.equal(greedy(model, ids()), expected)
    if LAYERS_KEEP_THEIR_CACHE:
        model.gradient_checkpointing_enable()
        assert torch.equal(greedy(model, ids()), expected)
    with torch.inference_mode():
        assert torch.equal(greedy(model, ids()), expected)


@right
def refuses_arguments_that_nobody_reads(model):
    with pytest.raises(ValueError, match="nonsense"):
        greedy(model, ids(), nonsense=3)


@right
def refuses_ways_whose_code_is_on_the_hub(model):
    for options in (
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 4, "force_words_ids": [[5]]},
    ):
        with pytest.raises(ValueError, match="requires `trust_remote_code=True`"):
            greedy(model, ids(), **options)


# The default takes nine tenths of the memory that is free.
FEW_BLOCKS = {
    "continuous_batching_config": ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
}
BATCH = "generate_batch: expected generate with .*For.*, got continuous batching"


@refused(NotImplementedError, BATCH)
def batches_continuously(model):
    prompts = [ids()[0].tolist(), ids()[0, :4].tolist()]
    settings = GenerationConfig(**GREEDY)
    done = model.generate_batch(prompts, generation_config=settings, **FEW_BLOCKS)
    assert [each.error for each in done.values()] == [None, None]
    assert [len(each.generated_tokens) for each in done.values()] == [5, 5]


@refused(NotImplementedError, BATCH)
def pages_its_cache(model):
    assert greedy(model, ids(), cache_implementation="paged", **FEW_BLOCKS).numel() == 12


@refused(ValueError, "cache_implementation: expected None or 'dynamic' .*got 'static'")
def has_a_static_cache(model):
    static = greedy(model, ids(), cache_implementation="static")
    assert torch.equal(static, greedy(model, ids()))


@refused(ValueError, "cache_implementation: expected None or 'dynamic' .*got 'static'")
def compiles_generation(model):
    config = CompileConfig(backend="eager")
    greedy(model, ids(), cache_implementation="static", compile_config=config)


# -- calls


@right
def takes_a_cache_back_and_forth(model):
    whole = model(ids()).logits
    first = model(ids()[:, :3], use_cache=True)
    second = model(ids()[:, 3:5], past_key_values=cache_of(first))
    third = model(ids()[:, 5:], past_key_values=cache_of(second)).logits
    torch.testing.assert_close(second.logits, whole[:, 3:5], **CLOSE)
    torch.testing.assert_close(third, whole[:, 5:], **CLOSE)


@right
def goes_on_from_a_cache_whatever_use_cache_says(model):
    first = model(ids()[:, :3], use_cache=True)
    held = {"past_key_values": cache_of(first), "use_cache": False}
    torch.testing.assert_close(model(ids()[:, 3:], **held).logits, model(ids()).logits[:, 3:])


@refused(TypeError, "past_key_values: expected an? .*Cache, which has a slot for each layer of")
def takes_a_cache_of_one_slot_a_layer(model):
    model(ids(), past_key_values=DynamicCache(), use_cache=True)


@right
def keeps_some_logits(model):
    whole = model(ids()).logits
    torch.testing.assert_close(model(ids(), logits_to_keep=2).logits, whole[:, -2:], **CLOSE)
    some = torch.tensor([0, 3])
    torch.testing.assert_close(model(ids(), logits_to_keep=some).logits, whole[:, some], **CLOSE)


@right
def gives_tuples(model):
    loss, logits, *_ = model(ids(), labels=ids(), return_dict=False)
    named = model(ids(), labels=ids())
    assert torch.equal(loss, named.loss)
    assert torch.equal(logits, named.logits)
    assert isinstance(model.get_decoder()(ids(), return_dict=False), tuple)


@right
def gives_states_where_the_configuration_says_so(model):
    assert model(ids()).hidden_states is None
    model.config.output_hidden_states = True
    assert model(ids()).hidden_states[0].shape[:2] == (1, 7)


@right
def has_the_loss_of_its_logits(model):
    logits = model(ids(2)).logits
    for divisor, reduction in ((None, "mean"), (torch.tensor(5), "sum")):
        expected = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids(2)[:, 1:].flatten(), reduction=reduction
        ) / (1 if divisor is None else divisor)
        found = model(ids(2), labels=ids(2), num_items_in_batch=divisor).loss
        torch.testing.assert_close(found, expected, check_dtype=False, **ONE_PASS)


@right
def takes_embeddings(model):
    embeds = model.get_input_embeddings()(ids())
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, model(ids()).logits, **CLOSE)


@right
def takes_integers_of_32_bits(model):
    assert torch.equal(model(ids().int()).logits, model(ids()).logits)


@right
def is_the_same_in_a_batch(model):
    torch.testing.assert_close(model(ids(3)).logits[:1], model(ids(3)[:1]).logits, **CLOSE)


@right
def finds_its_decoder_and_heads(model):
    states = model.get_decoder()(ids()).last_hidden_state
    torch.testing.assert_close(model.get_output_embeddings()(states), model(ids()).logits, **CLOSE)
    assert model.get_input_embeddings().weight.shape[0] == 320


@right
def is_called_with_other_parameters(model):
    halved = {name: p / 2 for name, p in model.named_parameters()}
    found = torch.func.functional_call(model, halved, (ids(),)).logits
    with torch.no_grad():
        for p in model.parameters():
            p /= 2
    torch.testing.assert_close(found, model(ids()).logits, **CLOSE)


@right
def switches_its_attention(model):
    expected = model(ids()).logits
    model.set_attn_implementation("eager")  # a Llama's has its softmax in fp32
    torch.testing.assert_close(model(ids()).logits, expected, **ANOTHER_WAY)
    with pytest.raises((ValueError, ImportError)):
        model.set_attn_implementation("nonsense")


@refused(ValueError, "output_attentions: expected False; the kernels keep no weights")
def gives_weights_of_attention(model):
    model.set_attn_implementation("eager")
    assert model(ids(), output_attentions=True).attentions[0].shape[-2:] == (7, 7)


@refused(ValueError, "output_attentions: expected False; the kernels keep no weights")
def gives_weights_of_attention_where_the_configuration_says_so(model):
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    assert model(ids()).attentions[0].shape[-2:] == (7, 7)


@refused(ValueError, "output_attentions: expected False; the kernels keep no weights")
def gives_weights_of_attention_in_generation(model):
    model.set_attn_implementation("eager")
    greedy(model, ids(), return_dict_in_generate=True, output_attentions=True)


@refused(ValueError, r"attention_mask: expected shape \[B, S\]")
def takes_a_mask_of_pairs(model):
    mask = torch.ones(7, 7).tril().bool()[None, None]
    torch.testing.assert_close(
        model(ids(), attention_mask=mask).logits, model(ids()).logits, **CLOSE
    )


@refused(TypeError, r"unknown arguments \['shift_labels'\]")
def takes_labels_that_are_shifted(model):
    shifted = F.pad(ids()[:, 1:], (0, 1), value=-100)
    found = model(ids(), labels=ids(), shift_labels=shifted).loss
    torch.testing.assert_close(found, model(ids(), labels=ids()).loss)


@right
def is_compiled(model):
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(
        compiled(ids(), use_cache=False).logits, model(ids()).logits, **ANOTHER_WAY
    )


@right
def is_exported_for_any_length(model):
    # Not a named range: torch 2.11 cannot show it to hold for the attention of a Llama.
    length = {"input_ids": {1: torch.export.Dim.DYNAMIC}, "use_cache": None}
    exported = torch.export.export(
        model,
        (),
        {"input_ids": ids(), "use_cache": False},
        dynamic_shapes=length,
        strict=False,
    ).module()
    for prompt in (ids(length=5), ids(length=12)):
        found = exported(input_ids=prompt, use_cache=False).logits
        torch.testing.assert_close(found, model(prompt).logits, **ANOTHER_WAY)


@right
def serves_a_pipeline(model):
    texts = ["hello", "a longer one"]
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer(), batch_size=2)
    words = tokenizer()
    for text, (found,) in zip(texts, writer(texts, **options), strict=True):
        prompt = words(text, return_tensors="pt").input_ids
        expected = words.decode(greedy(model, prompt, max_new_tokens=4)[0, prompt.shape[1] :])
        assert found["generated_text"] == text + expected
    writer(texts, stop_strings=["a"], tokenizer=words, **options)


@right
def takes_adapters(model):
    peft = pytest.importorskip("peft")
    before = model(ids()).logits.detach()
    settings = peft.LoraConfig(target_modules="all-linear", r=2, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, settings)
    torch.testing.assert_close(adapted(input_ids=ids()).logits, before, **CLOSE)
    adapted.train()
    adapted(input_ids=ids(), labels=ids()).loss.backward()
    grads = [p.grad for n, p in adapted.named_parameters() if "lora_B" in n]
    assert sum(grad is not None and grad.abs().max() > 0 for grad in grads) > len(grads) / 2
    adapted.eval()
    assert adapted.generate(input_ids=ids(), **GREEDY).shape == (1, 12)
    if hasattr(model.config, "turns"):
        with count_turns(adapted) as count:
            adapted(input_ids=ids(), turns=2)
        assert count.calls[0].unique().tolist() == [2]


# -- training


@right
def recomputes_its_layers(model):
    model.train()
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        if recompute:
            model.gradient_checkpointing_enable()
        model(ids(), labels=ids()).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, **CLOSE)


@right
def lets_gradients_into_its_inputs(model):
    model.enable_input_require_grads()
    for p in model.parameters():
        p.requires_grad_(False)
    model.train()
    assert model(ids(), labels=ids()).loss.requires_grad


@right
def trains_under_autocast(model):
    model.float().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids(), labels=ids()).loss
    loss.backward()
    assert loss.item() == pytest.approx(model(ids(), labels=ids()).loss.item(), rel=0.02)


@right
def smooths_the_labels_of_a_trainer(model):
    """With which the Trainer makes the loss, from logits and labels that are not shifted."""
    options = {"use_cpu": True, "report_to": [], "label_smoothing_factor": 0.1}
    with TemporaryDirectory() as folder:
        trainer = Trainer(model, TrainingArguments(folder, **options))
    found = trainer.compute_loss(model, {"input_ids": ids(2), "labels": ids(2)})
    logits = model(ids(2)).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, ids(2)[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found, expected, check_dtype=False, **ONE_PASS)


# -- the object


@right
def is_copied_and_pickled(model):
    expected = model(ids()).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids()).logits, expected)
    fresh = type(model)(copy.deepcopy(model.config)).to(model.dtype).eval()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(ids()).logits, expected, **CLOSE)


@right
def changes_its_dtype(model):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert model.to(dtype)(ids()).logits.dtype == dtype
    assert model.half().dtype == torch.float16
    assert model.float().dtype == torch.float32


@right
def resizes_its_vocabulary(model):
    kept = model(ids()).logits
    for size in (400, 320, 330):
        model.resize_token_embeddings(size)
        assert model.config.get_text_config().vocab_size == size
        logits = model(ids()).logits
        assert logits.shape[-1] == size
        torch.testing.assert_close(logits[..., :320], kept, **CLOSE)
    assert greedy(model, ids()).shape == (1, 12)


# -- files


def reloads(model, folder, **options):
    model.save_pretrained(folder)
    again = type(model).from_pretrained(folder, dtype="auto", **options)
    assert again.dtype == model.dtype
    torch.testing.assert_close(again(ids()).logits, model(ids()).logits, rtol=0, atol=0)
    return again


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_comes_back_from_its_files(name, dtype, tmp_path):
    make(name, torch.float32).save_pretrained(tmp_path / "wide")
    model = type(make(name)).from_pretrained(tmp_path / "wide", dtype=dtype)
    assert model.dtype == dtype
    reloads(model, tmp_path / "saved")


@pytest.mark.parametrize("name", MODELS)
def test_another_vocabulary_comes_back_from_its_files(name, tmp_path):
    model = make(name, torch.float32)
    model.resize_token_embeddings(400)
    assert reloads(model, tmp_path).get_input_embeddings().weight.shape[0] == 400


@pytest.mark.parametrize("name", MODELS)
def test_tied_weights_stay_tied(name, tmp_path):
    config = copy.deepcopy(make(name).config)
    config.tie_word_embeddings = True
    for part in ("decoder", "tie_embeddings"):
        if part == "decoder" and hasattr(config, part):
            config.decoder.tie_word_embeddings = True
        elif hasattr(config, part):
            setattr(config, part, True)
    model = type(make(name))(config).eval()

    def is_tied(net):
        return net.get_input_embeddings().weight is net.get_output_embeddings().weight

    assert is_tied(model)
    assert is_tied(copy.deepcopy(model))
    assert is_tied(reloads(model, tmp_path))
    model.resize_token_embeddings(330)
    assert is_tied(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_file_written_over_shards_counts(name, tmp_path):
    """transformers takes the shards away and leaves their index."""
    model = make(name, torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    reloads(model, tmp_path)


# -- caches that are not one's own

CACHES = {
    "ouro": lambda: OuroCache(2),
    "looped": lambda: LoopedDecoderCache(2, 2),
    "huginn": lambda: HuginnCache(1, 2),
    "another prelude": lambda: HuginnCache(3, 2),
    "another coda": lambda: LoopedDecoderCache(2, 3),
}


@pytest.mark.parametrize(("name", "cache"), [(n, c) for n in FAMILIES for c in CACHES if n != c])
def test_a_cache_with_other_slots_is_refused(name, cache):
    with pytest.raises((TypeError, ValueError), match=r"past_key_values: expected an? "):
        make(name)(ids(), past_key_values=CACHES[cache]())


@pytest.mark.parametrize("name", FAMILIES)
def test_of_two_caches_none_is_forgotten(name):
    model = make(name)
    one, other = model.empty_cache(), model.empty_cache()
    with pytest.raises(ValueError, match="cache: expected None when past_key_values is given"):
        model(ids(), past_key_values=one, cache=other)
    with torch.no_grad():
        model(ids()[:, :3], past_key_values=one, cache=one)
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"expected no.* with gradient checkpointing"):
        model(ids()[:, 3:], past_key_values=one, labels=ids()[:, 3:])


# -- the table


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("row", RIGHT)
def test_it_is_right(row, name):
    RIGHT[row](make(name))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("row", REFUSED)
def test_it_is_refused_by_name(row, name):
    function, kind, message = REFUSED[row]
    with pytest.raises(kind, match=message):
        function(make(name))


@pytest.mark.slow
@pytest.mark.parametrize("row", REFUSED)
def test_a_llama_is_not_refused(row):
    REFUSED[row][0](make("llama"))
