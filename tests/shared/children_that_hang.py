"""Work whose import never ends, as on a file system that is gone."""

import time

time.sleep(300)
