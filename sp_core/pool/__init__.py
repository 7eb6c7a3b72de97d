"""Worker processes and the control plane to them. Nothing here knows tensor maths or ComfyUI.

Two kinds of process use this folder, the coordinator (ComfyUI's process) and the workers (one process a device):

* in the coordinator: ``coordinator`` (the pool), ``request`` (the life of one request), ``links`` (hears from the workers),
  ``launcher`` (starts and ends processes), ``console`` (their output), ``devices`` (which workers), ``tensor_cache`` (what the
  workers hold already), ``processes`` (what the operating system says of a process);
* in a worker: ``bootstrap`` (its first file), ``orphaned`` (leaves when the coordinator is gone), ``worker`` (answers requests),
  ``run_ahead`` (stays near its device);
* in both: ``wire`` and ``control`` (messages), ``shared_buffer`` and ``shared_state`` (memory), ``protocol`` (agreed numbers),
  ``owner_lock`` (whether the coordinator is there), ``errors``.
"""
