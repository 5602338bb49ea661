from tfdist.memory.application import apply as apply
from tfdist.memory.application import remove as remove
from tfdist.memory.budget import Choice as Choice
from tfdist.memory.budget import MemoryReport as MemoryReport
from tfdist.memory.budget import choose as choose
from tfdist.memory.budget import report as report
from tfdist.memory.policy import MemoryPolicy as MemoryPolicy
