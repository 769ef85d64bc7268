"""Names in other libraries for the models, components and options of this one. Hints in error texts use them."""

import functools
from collections.abc import Mapping
from typing import Final, NoReturn

# Our name -> their names, in lower case, without hyphens and underscores. If one of theirs means several of ours, an
# error text suggests the first one that is valid there. Words after our name go into the hint.
_THEIRS: Final = {
    # groups of a config
    "model": "arch architecture",
    "attention": "attn selfattn mixer multihead multiheadconfig",
    "feedforward": "ffn mlp ff feedforwardconfig",
    "norm": "normalization normalisation",
    "residual": "residualnormstyle layernormstyle normstyle",
    "position": "positionalencoding positionencoding posemb posenc positionencodingconfig",
    "train": "trainer training optimizer optim",
    "data": "dataset",
    # options
    "hidden_dim": "dmodel dim dimmodel modeldim hiddensize nembd embeddim embdim embeddingdim embeddingsize modelsize",
    "num_layers": "nlayers nlayer numhiddenlayers depth numblocks nblocks numencoderlayers",
    "context_length": "maxseqlen seqlen maxpositionembeddings npositions nctx blocksize maxlen maxlength",
    "vocab_size": "vocab nvocab numtokens ntokens vocabularysize",
    "tie_embeddings": "tieweights tiewordembeddings weighttying tieembedding tieembeddingweights",
    "num_heads": "nheads nhead heads numattentionheads",
    "num_kv_heads": "nkvheads kvheads numkeyvalueheads",
    "head_dim": "dimhead dhead headsize dkv dimkey",
    "num_features": "dimfeatures nbfeatures",
    "window": "slidingwindow windowsize attentionwindow",
    "soft_cap": "attnlogitsoftcapping logitcap",
    "width": "dff dffn ffndim intermediatesize dimfeedforward ninner dinner ffnhiddensize hiddenfeatures mlpdim",
    "expansion": "hiddenlayermultiplier mlpratio ffnmult expansionfactor mlpmult",
    "activation": "hiddenact act activationfunction hiddenactivation nonlinearity actlayer",
    "embedding_dropout": "embdpdrop embdrop embeddropout embeddingdropoutprob",
    "embedding_norm": "wordembeddingslayernorm embeddinglayernorm embedlayernorm stableembedding normembeddings",
    "head_bias": "lmheadbias outputbias",
    "fraction": "rotarypct partialrotaryfactor rotarypercent rotaryfraction ropepct",
    "dropout": "residpdrop residdropout attndropout attnpdrop attentiondropout hiddendropoutprob drop pdrop",
    "stochastic_depth": "droppath droppathrate layerdrop",
    "eps": "epsilon normeps layernormeps layernormepsilon rmsnormeps varianceepsilon",
    "bias": "usebias qkvbias addbias",
    "base": "ropetheta theta ropebase rotarybase",
    "num_experts": "nexperts numlocalexperts nroutedexperts experts",
    "top_k": "numexpertspertok moetopk expertspertoken",
    "learning_rate": "lr maxlr",
    "min_learning_rate": "minlr",
    "steps": "maxsteps numsteps maxiters iterations trainsteps numtrainsteps",
    "batch_size": "bs microbatchsize trainbatchsize perdevicetrainbatchsize",
    "accumulate": "gradaccum gradientaccumulation gradientaccumulationsteps",
    "clip_norm": "gradclip maxgradnorm gradientclipval clipgradnorm",
    "warmup_steps": "warmup warmupiters numwarmupsteps",
    "precision": "dtype amp torchdtype",
    "output": "outdir outputdir savedir logdir",
    "resume": "resumefrom resumefromcheckpoint ckpt checkpoint",
    "evaluate_every": "evalinterval evalevery evalsteps",
    "checkpoint_every": "saveinterval saveevery savesteps",
    "keep_checkpoints": "savetotallimit keeplast keeplatestk",
    # arguments of a model
    "tokens_BT": "inputids idx inputs",
    "source_BS": "inputids src",
    "images": "pixelvalues",
    "targets_BT": "labels targets tgt",
    "targets_B": "labels targets",
    "inputs_BT": "decoderinputids",
    "segments_BT": "tokentypeids",
    "key_padding_mask": "attentionmask srckeypaddingmask",
    "num_tokens": "maxnewtokens",
    "stop_tokens": "eostokenid",
    # components
    "gated_mlp": "swiglu glu gatedffn llamamlp",
    "gated_mlp with activation=gelu": "geglu",
    "gated_mlp with activation=relu": "reglu",
    "mlp": "ffn feedforward positionwiseffn",
    "mixture_of_experts": "moe mixture smoe sparsemoe",
    "rms_norm": "rms t5norm",
    "layer_norm": "ln",
    "skip": "identity none nonorm",
    "rotary": "rope rotaryembedding rotarypositionembedding",
    "learned": "absolute learnable learnedembedding",
    "relative": "t5 t5bias relativebias",
    "sinusoidal": "sine sin fixed cosine",
    "multi_head": "mha attention selfattention scaleddotproduct scaleddotproductattention softmax sdpa vanilla",
    "multi_head with num_kv_heads=1": "mqa multiquery",
    "multi_head with num_kv_heads below num_heads": "gqa groupedquery",
    "favor": "performer",
    "fourier_mix": "fnet fourier",
    "local": "slidingwindow longformer windowed",
    "pooling": "poolformer",
    "pre": "prenorm preln",
    "post": "postnorm postln",
    "parallel": "parallelattn parallelattention parallelresidual useparallelresidual gptj",
    "parallel with separate_norms=true": "gptneox",
    "alibi": "linearbias attentionlinearbias",
    "silu": "swish swiglu",
    "gelu": "geglu",
    "relu": "reglu",
    "model with block=reversible": "reversible",
    "position with name=rotary": "userotaryembeddings",
    "gelu_tanh": "gelunew gelupytorchtanh gelufast",
    "squared_relu": "relu2 reglu2 relusquared",
    # shipped configs
    "off": "none disabled",
    "gpt2_small": "gpt2 gpt2base gpt2124m",
    "gpt_nano": "gpt nanogpt",
    "llama3_2_1b": "llama llama3 llama32",
    "bert_base": "bert bertbaseuncased bertbasecased",
    "t5_small": "t5",
    "vit_b16": "vit vitbase vitbasepatch16224",
    "mistral_7b": "mistral",
    "mixtral_8x7b": "mixtral",
    "gemma2_2b": "gemma gemma2",
    "qwen3_0_6b": "qwen qwen3",
    "qwen2_5_0_5b": "qwen2 qwen25",
    "opt_125m": "opt",
    "pythia_160m": "pythia",
    "gpt_neox_20b": "gptneox neox",
    "phi_2": "phi",
    "bloom_560m": "bloom",
}


@functools.cache
def _ours() -> Mapping[str, tuple[str, ...]]:
    ours_of: dict[str, tuple[str, ...]] = {}
    for ours, theirs in _THEIRS.items():
        for name in theirs.split():
            ours_of[name] = (*ours_of.get(name, ()), ours)
    return ours_of


def ours_for(name: str) -> tuple[str, ...]:
    """Return this library's names for a name in other libraries. Words may follow a name, such as an option to set.

    >>> ours_for("n_heads"), ours_for("GEGLU"), ours_for("gated_mlp")
    (('num_heads',), ('gated_mlp with activation=gelu', 'gelu'), ())
    """
    return _ours().get(plain(name), ())


def plain(name: str) -> str:
    """Return a name without case, hyphens and underscores.

    >>> plain("Layer-Norm") == plain("layer_norm")
    True
    """
    return "".join(letter for letter in name.lower() if letter.isalnum())


_OF_XFORMERS: Final = {
    "NVFusedBiasActivationDropout": "fuselayers.components.FusedBiasActivationDropout",
    "NVFusedBiasDropoutRes": "fuselayers.components.FusedBiasDropoutResidual",
    "NVFusedBiasDropoutResLayerNorm": "fuselayers.components.FusedBiasDropoutResidualLayerNorm",
    "build_attention": "fuselayers.components.create('attention', Choice(NAME, OPTIONS), WIDTH)",
    "build_feedforward": "fuselayers.components.create('feedforward', Choice(NAME, OPTIONS), WIDTH)",
    "memory_efficient_attention": "torch.nn.functional.scaled_dot_product_attention, which multi_head calls",
    "xFormer": "fuselayers.build",
    "xFormerConfig": "fuselayers.build, with a mapping",
}


def missing_attribute(name: str) -> NoReturn:
    """Raise AttributeError for a module's `__getattr__`; for a name of xFormers, ImportError with its replacement.

    It is an ImportError because `from MODULE import NAME` would lose the text of an AttributeError.
    """
    if name in _OF_XFORMERS:
        raise ImportError(f"{name} of xFormers is {_OF_XFORMERS[name]} here")
    raise AttributeError(f"module 'fuselayers' has no attribute {name!r}")
