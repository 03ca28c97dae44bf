# An API pod: HTTP in, server-sent events out. Built from the repository's root; holds no torch.
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /src

# Requirements first: no package of ours is there yet, so this layer changes with the two files only.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install -c constraints.txt '.[api]'
COPY headrace headrace
COPY shared shared
COPY api_service api_service
RUN pip install --no-deps --force-reinstall . && useradd --uid 10001 --create-home --shell /usr/sbin/nologin headrace

USER headrace
WORKDIR /home/headrace
EXPOSE 8000
# Alive, not ready: the balancer asks /ready itself, and a pod must not be restarted because Redis is away.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# The command becomes the program (exec), so SIGTERM reaches it and it drains.
CMD ["headrace", "api", "--host", "0.0.0.0", "--port", "8000"]
