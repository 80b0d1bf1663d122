# docker build -t lineartime .        With the CUDA build of PyTorch: --build-arg TORCH_INDEX=https://pypi.org/simple
# docker run --rm -v "$PWD:/work" lineartime generate small "Once upon a time"
# Not the slim image: torch.compile and Triton need its C compiler.
FROM python:3.12
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY . /src
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c /src/constraints.txt /src && rm -rf /src
RUN useradd --create-home --uid 1000 lineartime
# A user of another number has no home here: caches go where everybody may write.
ENV MPLCONFIGDIR=/tmp/matplotlib HF_HOME=/tmp/huggingface TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
USER lineartime
WORKDIR /work
ENTRYPOINT ["lineartime"]
CMD ["--help"]
