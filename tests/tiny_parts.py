"""Tokenizers, text encoders and VAEs of the tiny pipelines: real classes, small configs, no files.

The tokenizers know the words of ``WORDS`` as single tokens and spell everything else byte by byte (the
T5 ones: character by character), so that prompts are short and different prompts are different ids.
"""

from __future__ import annotations

import functools
import itertools
import string

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)
from tokenizers import pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    GlmConfig,
    GlmModel,
    LlamaConfig,
    LlamaModel,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

HIDDEN = 16
MAX_LENGTH = 32
LATENT_MEAN = [0.1, -0.2, 0.3, 0.0]
LATENT_STD = [1.5, 0.5, 1.0, 2.0]
QWEN3_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
WORDS = tuple(
    """
    a an the photo image picture drawing sketch painting of and to left right above below on in with big small
    one two three four red green blue yellow purple orange black white circle circles square squares triangle
    triangles star stars cat dog cats dogs car tree house bad blurry ugly low high prompt style
    system user assistant describe by detailing color shape size texture quantity text spatial relationships
    objects background think you are generate superior images degree alignment based textual prompts
    designed video theme
    """.split()
)


@functools.cache
def bpe(prefix: str = "", suffix: str = "") -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level BPE vocabulary and merges, in which each word of ``WORDS`` is one token.

    A word's merges come after those of the words before it, so that they leave these words whole.

    Args:
        prefix: the character that stands for a space before a word; words also exist without it.
        suffix: what the tokenizer puts at the end of each word.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys(letters + [letter + suffix for letter in letters] + [prefix or "a"])
    ranks: dict[tuple[str, str], int] = {}
    for word in dict.fromkeys(form for w in WORDS for form in (w, w.capitalize())):
        for start in {"": 0, prefix: 0}:
            pieces = [*(start + word)]
            pieces[-1] += suffix
            while len(pieces) > 1:
                known = [pair for pair in itertools.pairwise(pieces) if pair in ranks]
                best = min(known, key=ranks.__getitem__) if known else (pieces[0], pieces[1])
                ranks.setdefault(best, len(ranks))
                pieces = _merged(pieces, best)
                tokens[best[0] + best[1]] = None
    return {token: i for i, token in enumerate(tokens)}, list(ranks)


def _merged(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for piece in pieces:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return out


def clip_tokenizer(max_length: int = MAX_LENGTH) -> CLIPTokenizer:
    vocab, merges = bpe(suffix="</w>")
    vocab = vocab | {"<|startoftext|>": len(vocab), "<|endoftext|>": len(vocab) + 1}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=max_length)


def t5_tokenizer() -> T5Tokenizer:
    """Whole words of ``WORDS``, else printable ASCII characters; anything else is ``<unk>``."""
    words = dict.fromkeys(form for w in WORDS for form in (w, w.capitalize()))
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    pieces += [("▁" + word, -2.0) for word in words]
    pieces += [(letter, -8.0) for letter in string.printable if not letter.isspace()]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=MAX_LENGTH)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """With Qwen3's chat template, in short; the prefix of Qwen-Image's has 34 tokens, as released."""
    vocab, merges = bpe(prefix="Ġ")
    special = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>")
    vocab = vocab | {token: len(vocab) + i for i, token in enumerate(special)}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(special[2:]),
        chat_template=QWEN3_TEMPLATE,
        model_max_length=4 * MAX_LENGTH,
    )


def glm_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE, padded on the left, with GLM's two tokens in front; GLM's own class is only generic."""
    vocab, merges = bpe(prefix="Ġ")
    special = ("<|endoftext|>", "[gMASK]", "<sop>")
    vocab = vocab | {token: len(vocab) + i for i, token in enumerate(special)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        extra_special_tokens=list(special[1:]),
        padding_side="left",
        model_max_length=MAX_LENGTH,
    )
    return _with_prefix(tokenizer, special[1:])


def gemma_tokenizer() -> GemmaTokenizer:
    tokenizer = GemmaTokenizer(**_sentencepiece("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"))
    return _with_prefix(tokenizer, ("<bos>",))


def llama_tokenizer() -> LlamaTokenizer:
    special = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer = LlamaTokenizer(
        **_sentencepiece("<pad>", "</s>", "<s>", "<unk>", *special),
        pad_token="<pad>",
        extra_special_tokens=list(special),
        padding_side="right",
    )
    return _with_prefix(tokenizer, ("<s>",))


def _sentencepiece(*special: str) -> dict:
    vocab, merges = bpe(prefix="▁")
    tokens = dict.fromkeys([*special, *vocab, *(f"<0x{i:02X}>" for i in range(256))])
    return {
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
        "model_max_length": 2 * MAX_LENGTH,
    }


def _with_prefix(tokenizer: PreTrainedTokenizerFast, prefix: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """The tokenizer, which puts these special tokens in front of each prompt."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[*prefix, "$A"],
        pair=[*prefix, "$A", "$B"],
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token)) for token in prefix],
    )
    return tokenizer


def clip_text(projection: bool, max_length: int = MAX_LENGTH) -> CLIPTextModel | CLIPTextModelWithProjection:
    tokenizer = clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        projection_dim=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_factor=2.0,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)


def t5_text(hidden: int = 2 * HIDDEN) -> T5EncoderModel:
    return T5EncoderModel(T5Config(**_t5_sizes(hidden)))


def umt5_text(hidden: int = 2 * HIDDEN) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(**_t5_sizes(hidden)))


def _t5_sizes(hidden: int) -> dict:
    return {
        "vocab_size": len(t5_tokenizer()),
        "d_model": hidden,
        "d_kv": hidden // 2,
        "d_ff": 2 * hidden,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.1,
    }


def decoder_sizes(vocab_size: int) -> dict:
    """Kwargs that the configs of the decoder-only language models share."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }


def qwen3_text(lm_head: bool) -> Qwen3ForCausalLM | Qwen3Model:
    sizes = decoder_sizes(len(qwen_tokenizer())) | {"num_hidden_layers": 3}
    return (Qwen3ForCausalLM if lm_head else Qwen3Model)(Qwen3Config(**sizes, head_dim=HIDDEN // 2))


def llama_text() -> LlamaModel:
    tokenizer = llama_tokenizer()
    sizes = decoder_sizes(len(tokenizer)) | {"num_hidden_layers": 4}
    return LlamaModel(LlamaConfig(**sizes, pad_token_id=tokenizer.pad_token_id))


def glm_text() -> GlmModel:
    tokenizer = glm_tokenizer()
    sizes = decoder_sizes(len(tokenizer))
    return GlmModel(GlmConfig(**sizes, head_dim=HIDDEN // 2, pad_token_id=tokenizer.pad_token_id))


def gemma2_text() -> Gemma2Model:
    sizes = decoder_sizes(len(gemma_tokenizer()))
    return Gemma2Model(Gemma2Config(**sizes, head_dim=HIDDEN // 2, query_pre_attn_scalar=HIDDEN // 2))


def qwen_vl_text() -> Qwen2_5_VLForConditionalGeneration:
    tokenizer = qwen_tokenizer()
    text = decoder_sizes(len(tokenizer)) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "depth": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [0],
    }
    # No image is ever passed, so the ids of the image tokens need not be in the vocabulary.
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def kl_vae(levels: int = 3, **kwargs: object) -> AutoencoderKL:
    """Factor 4 with three levels; families differ in ``scaling_factor`` and ``shift_factor``."""
    sizes = {
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "block_out_channels": (8,) * levels,
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "sample_size": 32,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": 1.5305,
        "shift_factor": 0.0609,
    }
    return AutoencoderKL(**{**sizes, **kwargs})


def dc_vae() -> AutoencoderDC:
    return AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (5,)),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.41407,
    )


def wan_vae() -> AutoencoderKLWan:
    """Factor 8 in space and 4 in time."""
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=LATENT_MEAN,
        latents_std=LATENT_STD,
    )


def qwen_vae() -> AutoencoderKLQwenImage:
    """Factor 4."""
    return AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=LATENT_MEAN,
        latents_std=LATENT_STD,
    )


def flux2_vae() -> AutoencoderKLFlux2:
    """Factor 4; the statistics that its latents are whitened with are not trivial."""
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )
    vae.bn.running_mean.copy_(torch.tensor(LATENT_MEAN).repeat_interleave(4))
    vae.bn.running_var.copy_(torch.tensor(LATENT_STD).repeat_interleave(4) ** 2)
    return vae


def ltx_vae() -> AutoencoderKLLTXVideo:
    """Factor 8 in space and 4 in time."""
    vae = AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("LTXVideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 8),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False,) * 3,
        downsample_type=("conv", "conv"),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
        patch_size=2,
    )
    vae.latents_mean.copy_(torch.tensor(LATENT_MEAN))
    vae.latents_std.copy_(torch.tensor(LATENT_STD))
    return vae


def hunyuan_vae() -> AutoencoderKLHunyuanVideo:
    """Factor 8 in space and 4 in time."""
    return AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
