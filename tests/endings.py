"""The ways in which a program ends, for tests of what runs it."""

ENDINGS = {
    "well": "print('done')",
    "a code": "import sys; sys.exit(3)",
    "a code below 0": "import sys; sys.exit(-2)",
    "words": "import sys; sys.exit('why')",
    "an error": "def f():\n    raise ValueError('mine')\nf()",
    "an error in another file": "import json; json.loads('{')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "an interrupt": (
        "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5); print('no')"
    ),
    "at exit": "import atexit; atexit.register(print, 'bye'); print('first')",
    "its own class at exit": (
        "import atexit, pickle\nclass C: pass\natexit.register(lambda: print(pickle.dumps(C())))"
    ),
    "a file left open": (
        "import os\n"
        "def add(text): left.write(text)\n"
        "left = open(os.environ['DLOJZ_RUN'] + '/left.txt', 'w')\n"
        "add('more')"
    ),
    "a finalizer": (
        "import weakref\nclass C: pass\nmine = C(); weakref.finalize(mine, print, 'cleared up')"
    ),
    "a thread": "import threading, time\nthreading.Timer(0.3, print, ['late']).start()",
    "a process": (
        "import multiprocessing as m\n"
        "if __name__ == '__main__':\n"
        "    p = m.get_context('spawn').Process(target=print, args=('spawned',))\n"
        "    p.start(); p.join(); print(p.exitcode)"
    ),
    "who": (
        "import sys, os; print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(),"
        " 'DLOJZ_RUN' in os.environ, sys.modules['__main__'].__dict__ is globals(),"
        " os.getpgid(0) == os.getpid(), sys.stdin.read())\n"
        "import tempfile; print(tempfile.gettempdir())"
    ),
}
