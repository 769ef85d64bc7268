"""Models: tokens or images in, logits or a loss out."""

from .decoder import Decoder as Decoder
from .encoder import Encoder as Encoder
from .encoder_decoder import EncoderDecoder as EncoderDecoder
from .hierarchical_vision import HierarchicalVision as HierarchicalVision
from .layers import LayerChange as LayerChange
from .model import Model as Model
from .stack import Stack as Stack
from .vision_transformer import VisionTransformer as VisionTransformer
