from tfdist.memory.application import apply as apply
from tfdist.memory.application import remove as remove
from tfdist.memory.estimation.choosing import Choice as Choice
from tfdist.memory.estimation.choosing import choose as choose
from tfdist.memory.estimation.report import MemoryReport as MemoryReport
from tfdist.memory.estimation.report import report as report
from tfdist.memory.policy import MemoryPolicy as MemoryPolicy
