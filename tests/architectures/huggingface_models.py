"""Small models of Hugging Face's transformers, built from configurations.

Left out, of the types that AutoModel knows, are those that
- need what is not there: timm inside of transformers (timm_backbone, timm_wrapper, fast_vlm,
  gemma3n, edgetam, perception_lm, pe_video, omdet-turbo), natten (dinat), detectron2 (layoutlmv2),
  torchaudio inside of transformers (higgs_audio_v2_tokenizer);
- hold no Transformer: convolutional codecs and vocoders (dac, encodec, univnet, vibevoice's
  tokenizers), detectors and readers of text (pp_*, textnet, slanet, uvdoc), blt's and bark's
  stages that have no forward of their own;
- ask for sessions over a video (sam2_video, sam3_video, edgetam_video), for labels in training
  (fastspeech2_conformer) or for grids of images of all sizes (the towers of qwen2_vl and its kin,
  whose language models are here);
- are another type's class under another name (gpt-sw3, internlm3, iquestcoder).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from architectures import huggingface_inputs as inputs
from architectures.shrinking import HEAD_WIDTH, IMAGE_SIZE, NUM_HEADS, WIDTH, shrunk
from architectures.survey import Architecture, Inputs, Request

_NOT_SETTINGS: Final = (
    "transformers_version", "architectures", "_name_or_path", "dtype", "torch_dtype",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """How a model type is built and called.

    Attributes:
        cls: name of the class, in transformers or as `package.module.Class` below its models.
        make: makes the inputs.
        config: settings beside those that shrinking gives.
        takes_mask: whether the inputs can be padded and masked.
        takes_lengths: whether inputs of other lengths fit.
        note: what is special.
        prepare: what the model needs before its first call.
    """

    cls: str
    make: Callable[[Request], Inputs] = inputs.text
    config: Mapping[str, Any] = field(default_factory=dict)
    takes_mask: bool = False
    takes_lengths: bool = False
    note: str = ""
    prepare: Callable[[Any], object] = lambda _: None


def _table(text: str) -> dict[str, str]:
    return dict(entry.split(":") for entry in text.split())


_TEXT: Final = _table("""
    afmoe:AfmoeForCausalLM albert:AlbertForMaskedLM apertus:ApertusForCausalLM
    arcee:ArceeForCausalLM aria:AriaForConditionalGeneration aria_text:AriaTextForCausalLM
    audioflamingo3:AudioFlamingo3ForConditionalGeneration axk1:AXK1ForCausalLM
    axk2:AXK2ForCausalLM aya_vision:AyaVisionForConditionalGeneration
    bailing_hybrid:BailingHybridForCausalLM beam:BeamForCausalLM bert:BertForMaskedLM
    bert-generation:BertGenerationDecoder big_bird:BigBirdForMaskedLM biogpt:BioGptForCausalLM
    bitnet:BitNetForCausalLM bloom:BloomForCausalLM camembert:CamembertForMaskedLM
    clip_text_model:CLIPTextModel codegen:CodeGenForCausalLM cohere:CohereForCausalLM
    cohere2:Cohere2ForCausalLM cohere2_moe:Cohere2MoeForCausalLM
    cohere2_vision:Cohere2VisionForConditionalGeneration convbert:ConvBertForMaskedLM
    cosmos3_edge:Cosmos3EdgeForConditionalGeneration cosmos3_edge_text:Cosmos3EdgeTextModel
    cosmos3_omni:Cosmos3OmniForConditionalGeneration cpmant:CpmAntForCausalLM
    ctrl:CTRLLMHeadModel cwm:CwmForCausalLM data2vec-text:Data2VecTextForMaskedLM
    deberta:DebertaForMaskedLM deberta-v2:DebertaV2ForMaskedLM deepseek_v3:DeepseekV3ForCausalLM
    deepseek_v32:DeepseekV32ForCausalLM deepseek_v4:DeepseekV4ForCausalLM
    deepseek_vl:DeepseekVLForConditionalGeneration
    deepseek_vl_hybrid:DeepseekVLHybridForConditionalGeneration diffllama:DiffLlamaForCausalLM
    distilbert:DistilBertForMaskedLM doge:DogeForCausalLM dpr:DPRQuestionEncoder
    electra:ElectraForMaskedLM embedding_gemma2:EmbeddingGemma2Model
    embedding_gemma2_text:EmbeddingGemma2TextModel ernie:ErnieForMaskedLM
    ernie4_5:Ernie4_5ForCausalLM ernie4_5_moe:Ernie4_5_MoeForCausalLM
    eurobert:EuroBertForMaskedLM evolla:EvollaForProteinText2Text exaone4:Exaone4ForCausalLM
    exaone4_5:Exaone4_5_ForConditionalGeneration exaone_moe:ExaoneMoeForCausalLM
    falcon:FalconForCausalLM falcon_mamba:FalconMambaForCausalLM
    flaubert:FlaubertWithLMHeadModel flava:FlavaModel flex_olmo:FlexOlmoForCausalLM
    flint:FlintForCausalLM fnet:FNetForMaskedLM funnel:FunnelForMaskedLM fuyu:FuyuForCausalLM
    gemma:GemmaForCausalLM gemma2:Gemma2ForCausalLM gemma3:Gemma3ForConditionalGeneration
    gemma3_text:Gemma3ForCausalLM gemma4_unified:Gemma4UnifiedForConditionalGeneration
    gemma4_unified_text:Gemma4UnifiedForCausalLM git:GitForCausalLM glm:GlmForCausalLM
    glm4:Glm4ForCausalLM glm4_moe:Glm4MoeForCausalLM glm4_moe_lite:Glm4MoeLiteForCausalLM
    glm5_next:Glm5NextForConditionalGeneration glm5_next_text:Glm5NextTextModel
    glm_moe_dsa:GlmMoeDsaForCausalLM glmasr:GlmAsrForConditionalGeneration
    got_ocr2:GotOcr2ForConditionalGeneration gpt2:GPT2LMHeadModel
    gpt_bigcode:GPTBigCodeForCausalLM gpt_neo:GPTNeoForCausalLM gpt_neox:GPTNeoXForCausalLM
    gpt_neox_japanese:GPTNeoXJapaneseForCausalLM gpt_oss:GptOssForCausalLM gptj:GPTJForCausalLM
    granite:GraniteForCausalLM granite_docling:GraniteDoclingForConditionalGeneration
    granite_docling_text:GraniteDoclingTextModel
    granite_speech:GraniteSpeechForConditionalGeneration
    granite_speech_plus:GraniteSpeechPlusForConditionalGeneration
    granite_swa:GraniteSWAForCausalLM granitemoe:GraniteMoeForCausalLM
    granitemoe_swa:GraniteMoeSWAForCausalLM granitemoeshared:GraniteMoeSharedForCausalLM
    gte:GteForMaskedLM helium:HeliumForCausalLM
    higgs_audio_v2:HiggsAudioV2ForConditionalGeneration hy_v3:HYV3ForCausalLM
    hy_v4:HYV4ForCausalLM hyperclovax:HyperCLOVAXForCausalLM
    hyperclovax_vision_v2:HyperCLOVAXVisionV2ForConditionalGeneration ibert:IBertForMaskedLM
    idefics2:Idefics2ForConditionalGeneration idefics3:Idefics3ForConditionalGeneration
    imagegpt:ImageGPTForImageClassification inkling2:Inkling2ForConditionalGeneration
    inkling2_text:Inkling2ForCausalLM inkling_mm_model:InklingForConditionalGeneration
    inkling_text:InklingForCausalLM internvl:InternVLForConditionalGeneration
    jais2:Jais2ForCausalLM jetmoe:JetMoeForCausalLM
    jina_embeddings_v3:JinaEmbeddingsV3ForMaskedLM kimi_k25:Kimi_K25ForConditionalGeneration
    kimi_linear:KimiLinearForCausalLM kolibri1:Kolibri1ForCausalLM
    kosmos-2.5:Kosmos2_5ForConditionalGeneration laguna:LagunaForCausalLM
    layoutlm:LayoutLMForMaskedLM lfm2:Lfm2ForCausalLM lfm2_vl:Lfm2VlForConditionalGeneration
    lfm3:Lfm3ForCausalLM lfm3_vl:Lfm3VlForConditionalGeneration
    lighton_ocr:LightOnOcrForConditionalGeneration llama:LlamaForCausalLM
    llama4_text:Llama4ForCausalLM llava:LlavaForConditionalGeneration
    llava_next:LlavaNextForConditionalGeneration
    llava_next_video:LlavaNextVideoForConditionalGeneration
    llava_onevision:LlavaOnevisionForConditionalGeneration longcat_flash:LongcatFlashForCausalLM
    longformer:LongformerForMaskedLM luke:LukeForMaskedLM mamba:MambaForCausalLM
    markuplm:MarkupLMModel megatron-bert:MegatronBertForMaskedLM mellum:MellumForCausalLM
    mimo_v2_flash:MiMoV2FlashForCausalLM minicpm3:MiniCPM3ForCausalLM
    minicpm_ocr:MiniCPMOcrForConditionalGeneration
    minicpmv4_6:MiniCPMV4_6ForConditionalGeneration
    minicpmv4_7:MiniCPMV4_7ForConditionalGeneration minimax:MiniMaxForCausalLM
    minimax_m2:MiniMaxM2ForCausalLM minimax_m3_vl:MiniMaxM3SparseForConditionalGeneration
    minimax_m3_vl_text:MiniMaxM3VLForCausalLM ministral3:Ministral3ForCausalLM
    mistral:MistralForCausalLM mistral3:Mistral3ForConditionalGeneration
    mistral_large4:MistralLarge4ForConditionalGeneration
    mistral_large4_text:MistralLarge4TextModel mixtral:MixtralForCausalLM
    mllama:MllamaForCausalLM mobilebert:MobileBertForMaskedLM modernbert:ModernBertForMaskedLM
    modernbert-decoder:ModernBertDecoderForCausalLM modernvbert:ModernVBertForMaskedLM
    molmo2_text:Molmo2TextModel moshi:MoshiForCausalLM
    moss_transcribe_diarize:MossTranscribeDiarizeForConditionalGeneration mpnet:MPNetForMaskedLM
    mpt:MptForCausalLM mra:MraForMaskedLM muse_glimmer:MuseGlimmerForConditionalGeneration
    muse_glimmer_text:MuseGlimmerTextModel muse_spark_text:MuseSparkTextModel
    musicflamingo:MusicFlamingoForConditionalGeneration nanochat:NanoChatForCausalLM
    nemo_speechlm:Nemotron3_5TranscribeForConditionalGeneration nemotron_h:NemotronHForCausalLM
    nomic_bert:NomicBertForMaskedLM nystromformer:NystromformerForMaskedLM olmo:OlmoForCausalLM
    olmo2:Olmo2ForCausalLM olmo3:Olmo3ForCausalLM olmo_hybrid:OlmoHybridForCausalLM
    olmoe:OlmoeForCausalLM openai-gpt:OpenAIGPTLMHeadModel
    openai_privacy_filter:OpenAIPrivacyFilterModel opt:OPTForCausalLM
    ovis2:Ovis2ForConditionalGeneration paligemma:PaliGemmaForConditionalGeneration
    persimmon:PersimmonForCausalLM phi:PhiForCausalLM phi3:Phi3ForCausalLM
    phi4_multimodal:Phi4MultimodalForCausalLM phimoe:PhimoeForCausalLM
    qianfan_ocr:QianfanOCRForConditionalGeneration qwen2:Qwen2ForCausalLM
    qwen2_audio:Qwen2AudioForConditionalGeneration qwen2_moe:Qwen2MoeForCausalLM
    qwen3:Qwen3ForCausalLM qwen3_5_moe_text:Qwen3_5MoeForCausalLM
    qwen3_5_text:Qwen3_5ForCausalLM qwen3_asr:Qwen3ASRForConditionalGeneration
    qwen3_moe:Qwen3MoeForCausalLM qwen3_next:Qwen3NextForCausalLM
    qwen3_vl:Qwen3VLForConditionalGeneration qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration
    qwen3_vl_moe_text:Qwen3VLMoeTextModel qwen3_vl_text:Qwen3VLTextModel
    rembert:RemBertForMaskedLM roberta:RobertaForMaskedLM
    roberta-prelayernorm:RobertaPreLayerNormForMaskedLM roc_bert:RoCBertForMaskedLM
    roformer:RoFormerForMaskedLM rwkv:RwkvForCausalLM
    sam3_lite_text_text_model:Sam3LiteTextTextModel seed_oss:SeedOssForCausalLM
    smollm3:SmolLM3ForCausalLM smolvlm:SmolVLMForConditionalGeneration
    solar_open:SolarOpenForCausalLM splinter:SplinterModel squeezebert:SqueezeBertForMaskedLM
    stablelm:StableLmForCausalLM starcoder2:Starcoder2ForCausalLM tapas:TapasForMaskedLM
    tipsv2:Tipsv2Model tipsv2_text_model:Tipsv2TextModel ultrabert:UltrabertForMaskedLM
    ultravbert:UltraVBertForMaskedLM unlimited_ocr:UnlimitedOcrForConditionalGeneration
    vaultgemma:VaultGemmaForCausalLM video_llama_3:VideoLlama3ForConditionalGeneration
    video_llava:VideoLlavaForConditionalGeneration vipllava:VipLlavaForConditionalGeneration
    visual_bert:VisualBertModel voxtral:VoxtralForConditionalGeneration xglm:XGLMForCausalLM
    xlm:XLMWithLMHeadModel xlm-roberta:XLMRobertaForMaskedLM
    xlm-roberta-xl:XLMRobertaXLForMaskedLM xlnet:XLNetLMHeadModel yoso:YosoForMaskedLM
    youtu:YoutuForCausalLM zaya:ZayaForCausalLM
""")
_TRANSLATION: Final = _table("""
    bart:BartForConditionalGeneration bigbird_pegasus:BigBirdPegasusForConditionalGeneration
    blenderbot:BlenderbotForConditionalGeneration
    blenderbot-small:BlenderbotSmallForConditionalGeneration
    florence2:Florence2ForConditionalGeneration fsmt:FSMTForConditionalGeneration
    led:LEDForConditionalGeneration longt5:LongT5ForConditionalGeneration
    m2m_100:M2M100ForConditionalGeneration marian:MarianMTModel
    mbart:MBartForConditionalGeneration mt5:MT5ForConditionalGeneration
    mvp:MvpForConditionalGeneration nllb-moe:NllbMoeForConditionalGeneration
    pegasus:PegasusForConditionalGeneration pegasus_x:PegasusXForConditionalGeneration
    plbart:PLBartForConditionalGeneration prophetnet:ProphetNetForConditionalGeneration
    seamless_m4t:SeamlessM4TForTextToText seamless_m4t_v2:SeamlessM4Tv2ForTextToText
    switch_transformers:SwitchTransformersForConditionalGeneration t5:T5ForConditionalGeneration
    t5gemma:T5GemmaForConditionalGeneration t5gemma2:T5Gemma2ForConditionalGeneration
    umt5:UMT5ForConditionalGeneration
""")
_IMAGE: Final = _table("""
    aimv2_vision_model:Aimv2VisionModel beit:BeitForImageClassification
    chinese_clip_vision_model:ChineseCLIPVisionModel clip:CLIPForImageClassification
    clip_vision_model:CLIPVisionModel convnext:ConvNextForImageClassification
    convnextv2:ConvNextV2ForImageClassification
    data2vec-vision:Data2VecVisionForImageClassification deit:DeiTForImageClassification
    dinov2:Dinov2ForImageClassification
    dinov2_with_registers:Dinov2WithRegistersForImageClassification
    dinov3_convnext:DINOv3ConvNextModel dinov3_vit:DINOv3ViTModel dpt:DPTModel
    focalnet:FocalNetForImageClassification glpn:GLPNModel
    granite_docling_vision:GraniteDoclingVisionModel hiera:HieraForImageClassification
    idefics3_vision:Idefics3VisionTransformer ijepa:IJepaForImageClassification
    internvl_vision:InternVLVisionModel maskformer:MaskFormerModel
    maskformer-swin:MaskFormerSwinModel metaclip_2:MetaClip2ForImageClassification
    mgp-str:MgpstrForSceneTextRecognition mlcd:MLCDVisionModel
    mobilenet_v1:MobileNetV1ForImageClassification
    mobilenet_v2:MobileNetV2ForImageClassification mobilevit:MobileViTForImageClassification
    pixio:PixioModel pixtral:PixtralVisionModel poolformer:PoolFormerForImageClassification
    pvt:PvtForImageClassification pvt_v2:PvtV2ForImageClassification
    qianfan_ocr_vision:QianfanOCRVisionModel radio:RadioModel
    regnet:RegNetForImageClassification resnet:ResNetForImageClassification
    sam3_vision_model:Sam3VisionModel sam3_vit_model:Sam3ViTModel
    sam_hq_vision_model:SamHQVisionModel sam_vision_model:SamVisionModel
    segformer:SegformerForImageClassification siglip:SiglipForImageClassification
    siglip_vision_model:SiglipVisionModel smolvlm_vision:SmolVLMVisionTransformer
    swiftformer:SwiftFormerForImageClassification swin2sr:Swin2SRModel
    tipsv2_vision_model:Tipsv2VisionModel vit:ViTForImageClassification vit_mae:ViTMAEModel
    vit_msn:ViTMSNForImageClassification vitdet:VitDetModel yolos:YolosModel
""")

_WITHOUT_MASK = ("fnet",)
"""Language models that take no mask."""

# Settings beside those that shrinking gives.

_SMALL_RESNET: Final = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1], "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "out_indices": None,
}  # fmt: skip
_WAVEFORM: Final = {
    "conv_dim": [32, 32, 32], "conv_kernel": [2, 2, 2], "conv_stride": [2, 2, 2],
    "num_feat_extract_layers": 3, "num_conv_pos_embedding_groups": 2, "num_conv_pos_embeddings": 4,
    "feat_extract_norm": "layer", "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
    "conv_depthwise_kernel_size": 3,
}  # fmt: skip
_MROPE: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "longformer": {"attention_window": [4, 4]},
    "led": {"attention_window": [4, 4], "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64},
    "pegasus_x": {"block_size": 4, "num_global_tokens": 2},
    "longt5": {"local_radius": 3},
    "big_bird": {"attention_type": "original_full"},
    "hunyuan_v1_dense": {"head_dim": HEAD_WIDTH},
    "hunyuan_v1_moe": {"head_dim": HEAD_WIDTH},
    "ministral": {"head_dim": HEAD_WIDTH},
    "nemotron": {"num_key_value_heads": 2, "head_dim": HEAD_WIDTH},
    "esm": {"vocab_size": 64, "pad_token_id": 1, "mask_token_id": 63, "token_dropout": False,
            "position_embedding_type": "rotary"},
    "esmc": {"num_key_value_heads": NUM_HEADS},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "mistral4": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "siglip": {"text_config": {"projection_size": WIDTH}},
    "mamba2": {"num_heads": 8, "head_dim": HEAD_WIDTH, "n_groups": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_groups": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "qwen2_vl_text": {"rope_parameters": _MROPE},
    "qwen2_5_vl_text": {"rope_parameters": _MROPE},
    "glm4v_text": {"rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2]}},
    "swin": {"window_size": 2, "patch_size": 2, "hidden_size": 128, "num_layers": 4,
             "embed_dim": 16},
    "donut-swin": {"window_size": 2, "patch_size": 2, "num_layers": 4, "embed_dim": 16,
                   "hidden_size": 128},
    "swinv2": {"window_size": 2, "patch_size": 2, "num_layers": 4, "embed_dim": 16,
               "hidden_size": 128, "pretrained_window_sizes": [0, 0, 0, 0]},
    "cvt": {"depth": [1, 2, 3], "embed_dim": [16, 16, 32], "num_heads": [1, 2, 4]},
    "levit": {"hidden_sizes": [16, 32, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
              "key_dim": [8, 8, 8], "patch_size": 16,
              "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 2, 4, 2, 2]]},
    "bit": {"num_groups": 4, "embedding_size": 16},
    "mobilevitv2": {"image_size": 64},
    "albert": {"num_hidden_groups": 2},
}  # fmt: skip


# Inputs of their own.


def _images_and_text(request: Request) -> Inputs:
    return {**inputs.text(request), **inputs.image(request)}


def _states(request: Request) -> Inputs:
    length = max(request.lengths) + request.extra
    keep = inputs.keep(request)
    loud = keep[..., None] == 0

    def vectors(size: int) -> Tensor:
        return inputs.frames(request, size, 1)

    values = {
        "states": vectors(17),
        "actions": vectors(4),
        "rewards": vectors(1),
        "returns_to_go": vectors(1),
        "timesteps": torch.arange(length).expand(len(request.lengths), -1),
    }
    del loud
    return {**values, **({"attention_mask": keep} if request.masked else {})}


def _time_series(request: Request) -> Inputs:
    past, future = 24, 4
    return {
        "past_values": inputs.noise(request, past).abs(),
        "past_time_features": inputs.noise(request, past, 2),
        "past_observed_mask": torch.ones(len(request.lengths), past),
        "future_values": inputs.noise(request, future).abs(),
        "future_time_features": inputs.noise(request, future, 2),
    }


_SERIES: Final = {
    "prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2, 4, 8],
    "num_time_features": 2, "input_size": 1, "num_static_categorical_features": 0,
}  # fmt: skip


def _speech(cls: str, config: Mapping[str, Any] | None = None, **options: Any) -> Model:
    settings = {**_WAVEFORM, **(config or {})}
    return Model(cls, inputs.waveform, settings, takes_mask=True, takes_lengths=True, **options)


def _sounds(
    cls: str, size: int, stride: int, config: Mapping[str, Any] | None = None, **options: Any
) -> Model:
    make = partial(inputs.features, size=size, stride=stride, **options)
    return Model(cls, make, config or {}, takes_mask=True, takes_lengths=True)


def _boxed(request: Request) -> Inputs:
    return {**inputs.text(request), "bbox": inputs.boxes(request)}


def _text_model(cls: str, make: Callable[[Request], Inputs], **options: Any) -> Model:
    return Model(cls, make, takes_mask=True, takes_lengths=True, **options)


OTHERS: Mapping[str, Model] = {
    # Texts
    **{
        name: _text_model(cls, inputs.text)
        for name, cls in _table("""
            hunyuan_v1_dense:HunYuanDenseV1ForCausalLM hunyuan_v1_moe:HunYuanMoEV1ForCausalLM
            ministral:MinistralForCausalLM nemotron:NemotronForCausalLM esm:EsmForMaskedLM
            esmc:EsmcForMaskedLM dots1:Dots1ForCausalLM mamba2:Mamba2ForCausalLM
            falcon_h1:FalconH1ForCausalLM bamba:BambaForCausalLM
            granitemoehybrid:GraniteMoeHybridForCausalLM jamba:JambaForCausalLM
            recurrent_gemma:RecurrentGemmaForCausalLM qwen2_vl_text:Qwen2VLTextModel
            qwen2_5_vl_text:Qwen2_5_VLTextModel glm4v_text:Glm4vTextModel
            deepseek_v2:DeepseekV2ForCausalLM mistral4:Mistral4ForCausalLM
        """).items()
    },
    "xmod": _text_model(
        "XmodForMaskedLM", inputs.text, config={"languages": ["en_XX", "de_DE"]},
        prepare=lambda model: model.set_default_language("en_XX"),
    ),
    "canine": _text_model(
        "CanineModel", inputs.text, config={"downsampling_rate": 2, "local_transformer_stride": 4}
    ),
    "reformer": _text_model(
        "ReformerModelWithLMHead", inputs.text,
        config={"is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_embds": False,
                "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2,
                "hash_seed": 1, "num_hidden_layers": 2, "attention_head_size": 8},
    ),
    "layoutlmv3": _text_model(
        "LayoutLMv3ForTokenClassification", lambda request: {
            **_boxed(request), **inputs.image(request)},
        config={"coordinate_size": 6, "shape_size": 4, "input_size": IMAGE_SIZE},
    ),
    "layoutlmv3/text": _text_model(
        "LayoutLMv3ForTokenClassification", _boxed,
        config={"coordinate_size": 6, "shape_size": 4, "input_size": IMAGE_SIZE},
    ),
    "lilt": _text_model("LiltModel", _boxed, config={"hidden_size": 48}),
    "bros": _text_model(
        "BrosForTokenClassification", lambda request: {
            **inputs.text(request), "bbox": inputs.boxes(request).float() / 30},
        config={"dim_bbox_sinusoid_emb_2d": 16, "dim_bbox_sinusoid_emb_1d": 2,
                "dim_bbox_projection": 8},
    ),
    "udop": _text_model(
        "UdopForConditionalGeneration", lambda request: {
            **inputs.translation(request), "bbox": inputs.boxes(request).float() / 30},
    ),
    "decision_transformer": _text_model("DecisionTransformerModel", _states),
    # Sounds
    "wav2vec2": _speech("Wav2Vec2ForCTC"),
    "wav2vec2/group-norm": _speech("Wav2Vec2ForCTC", {"feat_extract_norm": "group"}),
    "wav2vec2/stable": _speech("Wav2Vec2ForCTC", {"do_stable_layer_norm": True}),
    "wav2vec2/base": _speech("Wav2Vec2Model"),
    "hubert": _speech("HubertForCTC"),
    "wavlm": _speech("WavLMForCTC"),
    "unispeech": _speech("UniSpeechForCTC"),
    "unispeech-sat": _speech("UniSpeechSatForCTC"),
    "data2vec-audio": _speech("Data2VecAudioForCTC"),
    "sew": _speech("SEWForCTC"),
    "sew-d": _speech("SEWDForCTC"),
    "wav2vec2-conformer": _speech("Wav2Vec2ConformerForCTC", {"vocab_size": 64}),
    "speecht5": Model(
        "SpeechT5ForSpeechToText",
        lambda request: inputs.with_targets(request, inputs.waveform(request)),
        _WAVEFORM, takes_mask=True, takes_lengths=True,
    ),
    "wav2vec2-bert": _sounds(
        "Wav2Vec2BertForCTC", 8, 1,
        {"vocab_size": 64, "feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 3},
    ),
    "wav2vec2-bert/adapter": _sounds(
        "Wav2Vec2BertForCTC", 8, 2,
        {"vocab_size": 64, "feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 3,
         "add_adapter": True},
    ),
    "speech_to_text": Model(
        "Speech2TextForConditionalGeneration",
        lambda request: inputs.with_targets(request, inputs.features(request, 8, 4)),
        {"conv_kernel_sizes": [3, 3], "conv_channels": 16, "input_feat_per_channel": 8},
        takes_mask=True, takes_lengths=True,
    ),
    "parakeet_ctc": _sounds("ParakeetForCTC", 8, 8),
    "parakeet_encoder": _sounds("ParakeetEncoder", 8, 8),
    "lasr_encoder": _sounds("LasrEncoder", 8, 4),
    "moonshine": Model(
        "MoonshineForConditionalGeneration",
        lambda request: inputs.with_targets(request, inputs.waveform(request, 384)),
        {"num_key_value_heads": 4, "encoder_num_key_value_heads": 4,
         "decoder_num_key_value_heads": 4},
        takes_mask=True, takes_lengths=True,
    ),
    "whisper": Model(
        "WhisperForConditionalGeneration",
        lambda request: inputs.with_targets(
            request, {"input_features": inputs.noise(request, 8, 32)}),
        {"max_source_positions": 16, "num_mel_bins": 8}, takes_lengths=True,
        note="its encoder takes one length",
    ),
    "audio-spectrogram-transformer": Model(
        "ASTForAudioClassification",
        lambda request: {"input_values": inputs.noise(request, 32, 16)},
        {"max_length": 32, "num_mel_bins": 16, "time_stride": 8, "frequency_stride": 8},
    ),
    # Images
    **{
        name: Model(cls, inputs.image)
        for name, cls in _table("""
            swin:SwinForImageClassification donut-swin:DonutSwinModel
            swinv2:Swinv2ForImageClassification cvt:CvtForImageClassification
            bit:BitForImageClassification
        """).items()
    },
    "levit": Model("LevitForImageClassification", partial(inputs.image, size=32)),
    "mobilevitv2": Model("MobileViTV2ForImageClassification", partial(inputs.image, size=64)),
    "efficientnet": Model(
        "EfficientNetForImageClassification", inputs.image,
        {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    ),
    "detr": Model(
        "DetrForObjectDetection", inputs.image,
        {"backbone_config": _SMALL_RESNET, "num_queries": 5},
    ),
    "conditional_detr": Model(
        "ConditionalDetrForObjectDetection", inputs.image,
        {"backbone_config": _SMALL_RESNET, "num_queries": 5},
    ),
    "deformable_detr": Model(
        "DeformableDetrForObjectDetection", partial(inputs.image, size=64),
        {"backbone_config": _SMALL_RESNET, "num_queries": 5, "num_feature_levels": 4},
    ),
    "table-transformer": Model(
        "TableTransformerForObjectDetection", inputs.image,
        {"backbone_config": _SMALL_RESNET, "num_queries": 5},
    ),
    # Films
    **{
        name: Model(
            cls, lambda request: {"pixel_values": inputs.video(request)}, {"num_frames": 2},
        )
        for name, cls in _table("""
            timesformer:TimesformerForVideoClassification
            videomae:VideoMAEForVideoClassification vivit:VivitForVideoClassification
        """).items()
    },
    # Images and texts
    **{
        f"{name}/both": Model(
            cls, _images_and_text, takes_mask=True, takes_lengths=True,
        )
        for name, cls in _table("""
            clip:CLIPModel siglip:SiglipModel altclip:AltCLIPModel chinese_clip:ChineseCLIPModel
            blip:BlipForConditionalGeneration vilt:ViltModel git:GitForCausalLM flava:FlavaModel
            groupvit:GroupViTModel owlvit:OwlViTModel metaclip_2:MetaClip2Model
            clipseg:CLIPSegModel aimv2:Aimv2Model
        """).items()
    },
    "lxmert": _text_model(
        "LxmertModel", lambda request: {
            **inputs.text(request), "visual_feats": inputs.noise(request, 3, 16),
            "visual_pos": inputs.noise(request, 3, 4)},
        config={"visual_feat_dim": 16, "visual_pos_dim": 4},
    ),
    # Series
    "patchtst": Model(
        "PatchTSTForPrediction", lambda request: {"past_values": inputs.noise(request, 16, 2)},
        {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4,
         "prediction_length": 4, "norm_type": "batchnorm"},
    ),
    "patchtst/layer-norm": Model(
        "PatchTSTForPrediction", lambda request: {"past_values": inputs.noise(request, 16, 2)},
        {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4,
         "prediction_length": 4, "norm_type": "layernorm"},
    ),
    "patchtsmixer": Model(
        "PatchTSMixerForPrediction", lambda request: {"past_values": inputs.noise(request, 16, 2)},
        {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4,
         "prediction_length": 4},
    ),
    "informer": Model("InformerModel", _time_series, _SERIES),
    "autoformer": Model("AutoformerModel", _time_series, {**_SERIES, "moving_average": 3}),
    "time_series_transformer": Model("TimeSeriesTransformerModel", _time_series, _SERIES),
}  # fmt: skip


def _models() -> dict[str, Model]:
    models = {}
    for name, cls in _TEXT.items():
        alone = "ForConditionalGeneration" in cls
        takes = name not in _WITHOUT_MASK
        models[name] = Model(
            cls, inputs.text, takes_mask=takes, takes_lengths=True,
            note="text alone" if alone else "",
        )  # fmt: skip
    for name, cls in _TRANSLATION.items():
        models[name] = Model(cls, inputs.translation, takes_mask=True, takes_lengths=True)
    for name, cls in _IMAGE.items():
        models[name] = Model(cls, inputs.image)
    return {**models, **OTHERS}


def build(model_type: str, model: Model) -> nn.Module:
    """Return a small random model, in evaluation mode."""
    library = pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    settings = shrunk(kind().to_dict(), {**SETTINGS.get(model_type, {}), **model.config})
    for name in _NOT_SETTINGS:
        settings.pop(name, None)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        made = getattr(library, model.cls)(kind.from_dict(settings))
        model.prepare(made)
        return inputs.seeded(made)


def _architecture(name: str, model: Model) -> Architecture:
    return Architecture(
        name,
        "transformers",
        partial(build, name.partition("/")[0], model),
        model.make,
        model.takes_mask,
        model.takes_lengths,
        model.note,
    )


ARCHITECTURES: Final = tuple(
    _architecture(name, model) for name, model in sorted(_models().items())
)
