from tfdist.callbacks.chief_only import on_chief as on_chief
from tfdist.callbacks.tensorboard import TensorBoard as TensorBoard
from tfdist.checkpoint.backup_and_restore import BackupAndRestore as BackupAndRestore
from tfdist.checkpoint.lock import FolderInUseError as FolderInUseError
from tfdist.checkpoint.store import CheckpointStore as CheckpointStore
from tfdist.checkpoint.store import DamagedBackupsError as DamagedBackupsError
