"""Build models from config. Hydra composes YAML groups, which are checked and turned into plain dataclasses once."""

from .build import build as build
from .build import compose as compose
from .costs import ModelCosts as ModelCosts
from .costs import model_costs as model_costs
from .from_pretrained import from_pretrained as from_pretrained
from .group_files import COMPONENT_GROUPS as COMPONENT_GROUPS
from .group_files import COMPONENT_SECTIONS as COMPONENT_SECTIONS
from .group_files import GROUPS as GROUPS
from .group_files import choices as choices
from .hugging_face import load_hugging_face as load_hugging_face
from .rebuild import RebuildError as RebuildError
from .rebuild import RebuildWarning as RebuildWarning
from .rebuild import rebuild as rebuild
from .schemas import Config as Config
from .schemas import DataConfig as DataConfig
from .schemas import FusionConfig as FusionConfig
from .schemas import ParallelConfig as ParallelConfig
from .schemas import TrainConfig as TrainConfig
from .sources import to_yaml as to_yaml
