"""Build models from config. Hydra composes YAML groups, which are checked and turned into plain dataclasses once."""

from .build import build as build
from .build import compose as compose
from .build import to_yaml as to_yaml
from .costs import ModelCosts as ModelCosts
from .costs import model_costs as model_costs
from .from_pretrained import from_pretrained as from_pretrained
from .group_files import choices as choices
from .hugging_face import load_hugging_face as load_hugging_face
from .rebuild import RebuildError as RebuildError
from .rebuild import RebuildWarning as RebuildWarning
from .rebuild import rebuild as rebuild
from .sections import COMPONENT_GROUPS as COMPONENT_GROUPS
from .sections import COMPONENT_SECTIONS as COMPONENT_SECTIONS
from .sections import GROUPS as GROUPS
from .sections import Config as Config
from .sections import DataConfig as DataConfig
from .sections import FusionConfig as FusionConfig
from .sections import ParallelConfig as ParallelConfig
from .sections import TrainConfig as TrainConfig
