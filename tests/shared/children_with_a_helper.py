"""Work whose imports fail, and leave a process behind."""

import subprocess
import sys

helper = subprocess.Popen(["sleep", "300"])
sys.exit(f"started {helper.pid}")
