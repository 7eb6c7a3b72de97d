"""Whether code of other packs computes the same on a rank's part of the data as on all of it.

A function is probed at its first call in a sampling run, at each place and shape. It is called twice on whole data (as it is,
whose result is used, and with NaN in the place of the other ranks' parts) and once on this rank's part. It is shared out from
its second call on if four things hold:

1. Every operation of that call was seen, and keeps NaN (:mod:`.trace`).
2. With NaN in the place of all other ranks' parts, this rank's part of the result is the same. So no weight, not even one
   of zero, brings anything of them into it.
3. On this rank's part alone it gives this rank's part of the result.
4. It reads no values of tensors into Python, draws and writes nothing, and all that it can see of Python can be compared
   (:mod:`.visible_state`). While that is as it was, the function takes the same way through its code, whatever the
   numbers are.

The fourth is looked at again at every later call. When it does not hold any more, all ranks learn of it behind the forward,
take the verdict back and compute that forward again.
"""

from __future__ import annotations

from .contents import Contents
from .probe import Probe, Verdict
from .verdicts import Probing, Site, Verdicts

__all__ = ["Contents", "Probe", "Probing", "Site", "Verdict", "Verdicts"]
