{
  description = "Run large language models on a compressed KV cache";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-unstable";

  outputs =
    { self, nixpkgs }:
    let
      systems = [ "x86_64-linux" "aarch64-linux" "aarch64-darwin" "x86_64-darwin" ];
      forAllSystems = f: nixpkgs.lib.genAttrs systems (system: f nixpkgs.legacyPackages.${system});
      manifest = (nixpkgs.lib.importTOML ./Cargo.toml).workspace.package;
    in
    {
      packages = forAllSystems (pkgs: {
        default = pkgs.rustPlatform.buildRustPackage {
          pname = "kvant";
          inherit (manifest) version;
          src = self;
          cargoLock.lockFile = ./Cargo.lock;
          buildAndTestSubdir = "crates/cli";
          buildFeatures = [ "wgpu" "grpc" "kv-events" "otel" ];
          # `.ci/run` is what tests it.
          doCheck = false;
          nativeBuildInputs = [ pkgs.installShellFiles ];
          postInstall = ''
            installShellCompletion --cmd kvant \
              --bash <($out/bin/kvant completions bash) \
              --fish <($out/bin/kvant completions fish) \
              --zsh <($out/bin/kvant completions zsh)
            $out/bin/kvant man >kvant.1
            installManPage kvant.1
          '';
          meta = {
            description = "Run large language models on a compressed KV cache";
            license = with pkgs.lib.licenses; [ mit asl20 ];
            mainProgram = "kvant";
          };
        };
      });
    };
}
