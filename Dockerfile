# Kvant in a container that holds the binary, the C library it runs on, and nothing else.
#
#   docker build -t kvant .
#   docker run --rm -it -v "$PWD:/models" kvant run model.gguf "Hello"
#
# With an NVIDIA GPU, `--gpus all` brings the driver, which is all that the kernels need.

FROM rust:1.95-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN cargo build --profile profiling --locked -p kvant-cli
# The names and lines that debuggers, profilers and backtraces want go beside the binary.
RUN mkdir /out /out/models \
    && cp target/profiling/kvant.dwp /out \
    && objcopy --only-keep-debug target/profiling/kvant /out/kvant.debug \
    && objcopy --strip-debug --add-gnu-debuglink=/out/kvant.debug target/profiling/kvant /out/kvant

# `docker build --target symbols -o DIR .` writes them to a folder.
FROM scratch AS symbols
COPY --from=build /out/kvant.debug /out/kvant.dwp /

FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /out/kvant /usr/local/bin/kvant
COPY --from=build --chown=nonroot:nonroot /out/models /models
# What the hub is asked for is kept with the models.
ENV HF_HOME=/models/huggingface
VOLUME /models
WORKDIR /models
USER nonroot
ENTRYPOINT ["kvant"]
