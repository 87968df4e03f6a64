"""Write tests/data/text_*.json: what other programs make of texts, tokens and conversations.

Trains two tiny vocabularies on the text below and records

- text_sentencepiece.json: a SentencePiece BPE vocabulary as GGUF stores it; the sentencepiece library's ids and texts;
- text_byte_level.json: a byte-level BPE vocabulary; ids by tiktoken (llama-bpe), transformers' Qwen2Tokenizer and
  GPT2Tokenizer (qwen2, gpt-2), and the tokenizers library's Digits + ByteLevel (smollm);
- text_chats.json: conversations rendered by transformers' apply_chat_template.

Run it in an environment with transformers, tiktoken, tokenizers and sentencepiece; none is needed to run the tests.
"""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
from jinja2 import TemplateError
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"

CORPUS = """The harbour master counted the boats at dawn, as he had done for thirty years, and wrote 17 in the book.
He didn't look up when the ferry came in; she'd be late, they're always late, and he'll write that down too.
Rain fell on the roofs. It fell on the nets, on the crates of herring, on the 248 lobster pots and the old dog.
"Where's the captain?" asked the girl. "I've brought 3 letters, 12 stamps and 2048 grams of butter for him."
def count(boats):\n    total = 0\n    for boat in boats:\n        total += boat.size\n    return total
Am Hafen zählte der Kapitän die Boote, während größere Schiffe draußen vorüberzogen. Übermorgen wird es schöner.
Le phare éclaire la côte; l'été dernier, vingt bateaux étaient rentrés à l'aube. Ça va, répondit-il.
Корабль вышел из гавани на рассвете, и старый моряк записал его имя в книгу.
港の朝は静かだ。船は二十隻、猫は三匹。港口很安静，船长在数船。
The boats, the boats, the boats were counting the counted boats and the counting was counted by the counter.
"""

PARTS = (
    *("The", " boats", " counted", "ing", " ", "  ", "   ", "\t", "\n", "\n\n", " \n", "\r\n", "don't", "THEY'LL", "I'Ve", "'s"),
    *("7", "42", "2048", "123456", "٣٤", "½", "é", "e\u0301", "größer", "Корабль", " гавани", "港の朝", "船", "한국어", "🍕", "👩‍👩‍👧"),
    *("...", "!?", "<x>", "$5 + $6 <= 12^2", "_", "▁", "\u00a0", "\x00", "aaaa", "abababab", " the", "for boat in boats:", "ſ", "ﬁ"),
)


def texts(count: int, seed: int) -> list[str]:
    pick = random.Random(seed)
    return ["", " ", "a", " a", "The boats"] + [
        "".join(pick.choice(PARTS) for _ in range(pick.randint(1, 9))) for _ in range(count)
    ]


def sentencepiece_references() -> dict[str, Any]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["<call>"],
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = processor.get_piece_size()
    pick = random.Random(3)
    byte_ids = [i for i in range(size) if processor.is_byte(i)]
    normal_ids = [i for i in range(size) if not processor.is_byte(i) and not processor.is_unknown(i)]
    streams = [
        [pick.choice(byte_ids if pick.random() < 0.4 else normal_ids) for _ in range(pick.randint(1, 12))]
        for _ in range(60)
    ] + [processor.encode(text) for text in texts(60, 4)]
    return {
        "metadata": {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in range(size)],
            "tokenizer.ggml.scores": [round(processor.get_score(i), 4) for i in range(size)],
            "tokenizer.ggml.token_type": [_token_type(processor, i) for i in range(size)],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        },
        "encoded": [[text, processor.encode(text)] for text in texts(150, 5)],
        "decoded": [[ids, processor.decode(ids)] for ids in streams],
    }


def _token_type(processor: sentencepiece.SentencePieceProcessor, index: int) -> int:
    if processor.id_to_piece(index) == "<call>":
        return 4
    if processor.is_unknown(index):
        return 2
    if processor.is_control(index):
        return 3
    return 6 if processor.is_byte(index) else 1


def byte_level_references() -> dict[str, Any]:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    model = json.loads(trained.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    samples = texts(150, 6)
    smollm = Tokenizer(models.BPE(vocab, merges))
    smollm.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    qwen2, gpt2 = (kind(vocab=vocab, merges=merges) for kind in (Qwen2Tokenizer, GPT2Tokenizer))
    llama3 = _tiktoken(vocab)
    encoders = {
        "smollm": lambda text: smollm.encode(text).ids,
        "gpt-2": lambda text: gpt2.encode(text, add_special_tokens=False),
        "qwen2": lambda text: qwen2.encode(text, add_special_tokens=False),
        "llama-bpe": llama3.encode_ordinary,
    }
    return {
        "tokens": sorted(vocab, key=vocab.__getitem__),
        "merges": [" ".join(merge) for merge in merges],
        "texts": samples,
        "encoded": {name: [encode(text) for text in samples] for name, encode in encoders.items()},
    }


def _tiktoken(vocab: dict[str, int]) -> tiktoken.Encoding:
    """Llama 3's own tokenizer library on this vocabulary: a token's rank is its id, whole pieces come first."""
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    ranks = {bytes(byte_of[char] for char in token): rank for token, rank in vocab.items()}
    return tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


TEMPLATES = {
    "chatml": """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""",
    "default system": """
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}{% set system = 'You know ships.' %}{% set rest = messages %}{% endif %}
<|im_start|>system
{{ system }}{% if tools %}

Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}<|im_end|>
{% for message in rest %}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
""",
    "headers and bos": """
{{- bos_token }}
{%- set names = namespace(last='') %}
{%- for message in messages %}
    {%- set names.last = message['role'] %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt and names.last != 'assistant' %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
    "alternating": """
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/user/assistant') }}
{% endif %}
{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}
{% endfor %}
""",
    "every helper": """
{% for message in messages %}
{% if message['role'] == 'system' %}{% continue %}{% endif %}
  {% if loop.index > 3 %}{% break %}{% endif %}
    {% if true %}
      indented
    {% endif %}
{{ message | tojson }} {{ message | tojson(indent=2) }} {{ [unknown_name, 1] | length }}{{ unknown_name }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}{% endif %}
{% endfor %}
{{ documents is none }} {{ tools is none }} {{ strftime_now('%%') }} {{ thinking | default('unset') }} {{ dict(a=1)['a'] }}
""",
}

SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "  What's <b>that</b> & \"this\"? "}
ANSWER = {"role": "assistant", "content": "A ship: größer, 船, 🍕."}
SECOND = {"role": "user", "content": "Count\nto 3"}
CHATS = ([FIRST], [SYSTEM, FIRST], [FIRST, ANSWER, SECOND], [SYSTEM, FIRST, ANSWER, SECOND], [FIRST, FIRST])


def chat_references() -> dict[str, Any]:
    backend = Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    cases = []
    for name, source in TEMPLATES.items():
        for messages in CHATS:
            for prompt in (True, False):
                extra = {"thinking": "on"} if prompt else {}
                case = {"template": name, "messages": messages, "add_generation_prompt": prompt, "extra": extra}
                try:
                    case["text"] = tokenizer.apply_chat_template(
                        messages, chat_template=source, tokenize=False, add_generation_prompt=prompt, **extra
                    )
                except TemplateError as error:
                    case["refused"] = str(error)
                cases.append(case)
    return {"templates": TEMPLATES, "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"}, "cases": cases}


def main() -> None:
    for name, make in (
        ("sentencepiece", sentencepiece_references),
        ("byte_level", byte_level_references),
        ("chats", chat_references),
    ):
        path = DATA / f"text_{name}.json"
        path.write_text(json.dumps(make(), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
