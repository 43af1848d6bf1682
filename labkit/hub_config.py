"""JupyterHub's configuration for a class: `python -m labkit hub` starts it in the class's folder.

Change a copy of it for more than a class on one server: another authenticator, or a spawner that gives each learner an account
or a container of their own (jupyterhub.readthedocs.io lists them).
"""

import json
import os
import sys
import weakref
from pathlib import Path

from jupyterhub.spawner import SimpleLocalProcessSpawner

from labkit import hub, machine

settings = json.loads(Path("hub.json").read_text())


class LearnersServer(SimpleLocalProcessSpawner):
    """One learner's Jupyter server: a home of its own with copies of the labs, on the least loaded GPU."""

    known = weakref.WeakSet()
    gpu, python = None, {}

    async def start(self):
        """Copy the labs that the learner lacks, make their Python, choose a GPU, and start the server; returns its address."""
        hub.copy_labs(settings["labs"], Path(self.home_dir))
        self.python = hub.own_python(Path(self.home_dir))
        self.gpu = hub.least_loaded([server.gpu for server in self.known])
        return await super().start()

    def get_env(self):
        """Return the environment, with the learner's Python, and the GPU and the share of its memory where there is one."""
        gpu = {"CUDA_VISIBLE_DEVICES": self.gpu,
               "LABKIT_GPU_SHARE": str(hub.share(len(settings["names"]), len(machine.gpus())))} if self.gpu else {}
        return super().get_env() | self.python | gpu

    def get_state(self):
        """Return what JupyterHub keeps of this server in its database, and the GPU (its UUID or None)."""
        return super().get_state() | {"gpu": self.gpu}

    def load_state(self, state):
        """Take up what the database kept, and be known to all other servers."""
        super().load_state(state)
        self.gpu = state.get("gpu")
        self.known.add(self)  # JupyterHub calls this for every server, also for one that has yet to start

    def clear_state(self):
        """Forget the GPU, once the server has stopped."""
        super().clear_state()
        self.gpu = None


c = globals()["get_config"]()  # JupyterHub puts it there
c.JupyterHub.ip, c.JupyterHub.port = settings["ip"], settings["port"]
c.JupyterHub.hub_port = settings["port"] + 2  # this and the next listen on this machine only
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{settings['port'] + 1}"
c.ConfigurableHTTPProxy.command = [settings["proxy"]]
c.JupyterHub.upgrade_db = True  # a class's folder may be from before an update of JupyterHub
if settings["ssl"]:
    c.JupyterHub.ssl_key, c.JupyterHub.ssl_cert = settings["ssl"]

c.JupyterHub.authenticator_class = "shared-password"
c.Authenticator.allowed_users = set(settings["names"])
c.Authenticator.allow_existing_users = False  # who was in the class before and is no longer
c.SharedPasswordAuthenticator.user_password = hub.password(".")
c.JupyterHub.cookie_secret = os.urandom(32)  # whoever signed in before, with another password, signs in again

c.JupyterHub.spawner_class = LearnersServer
c.SimpleLocalProcessSpawner.home_dir_template = os.path.abspath("learners/{username}")
c.Spawner.cmd = [sys.executable, "-P", "-m", "jupyterhub.singleuser"]  # -P: a learner's random.py is not Python's
c.Spawner.default_url = "/lab/tree/notebooks/" + min(path.name for path in Path(settings["labs"]).glob("*.ipynb"))
c.Spawner.env_keep = ["PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "LABKIT_MODE", "LABKIT_RECORDING", "LABKIT_TABLES", "LABKIT_BUDGET",
                      "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_CERT",  # where pip finds packages, and by which way
                      *(name for name in os.environ if name.upper() in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"))]
c.Spawner.environment = {"MPLCONFIGDIR": os.path.abspath("matplotlib")}  # its list of fonts takes seconds: once for all
c.Spawner.start_timeout = c.Spawner.http_timeout = 120  # seconds: a class signs in all at once
c.Spawner.args = [f"--MappingKernelManager.cull_idle_timeout={settings['idle_s']}", "--MappingKernelManager.cull_interval=60",
                  "--MappingKernelManager.cull_connected=True",  # a tab left open would keep its memory of the GPU all night
                  "--LabApp.extension_manager=readonly",
                  '--ServerApp.terminado_settings={"shell_command": ["/bin/bash"]}',  # no login shell: that would set PATH anew
                  f"--ServerApp.shutdown_no_activity_timeout={settings['idle_s']}", *["--allow-root"] * settings["root"]]
