"""Build models from config: YAML groups composed by Hydra, checked, and turned into plain dataclasses once."""

from .build import build as build
from .compose import compose as compose
from .costs import ModelCosts as ModelCosts
from .costs import model_costs as model_costs
from .files import choices as choices
from .folders import COMPONENT_GROUPS as COMPONENT_GROUPS
from .folders import GROUPS as GROUPS
from .hugging_face import load_hugging_face as load_hugging_face
from .rebuild import RebuildError as RebuildError
from .rebuild import RebuildWarning as RebuildWarning
from .rebuild import rebuild as rebuild
from .render import to_yaml as to_yaml
from .schemas import Config as Config
from .schemas import DataConfig as DataConfig
from .schemas import FusionConfig as FusionConfig
from .schemas import TrainConfig as TrainConfig
