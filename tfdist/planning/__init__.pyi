from tfdist.planning.hardware import PRESETS as PRESETS
from tfdist.planning.hardware import Device as Device
from tfdist.planning.hardware import Hardware as Hardware
from tfdist.planning.hardware import Link as Link
from tfdist.planning.plan import Plan as Plan
from tfdist.planning.plan import plan as plan
from tfdist.planning.prediction import Prediction as Prediction
