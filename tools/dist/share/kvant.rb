class Kvant < Formula
  desc "$description"
  homepage "$url"
  version "$version"
  license any_of: ["MIT", "Apache-2.0"]

  on_macos do
    on_arm do
      url "$url/releases/download/v$version/kvant-$version-aarch64-apple-darwin.tar.zst"
      sha256 "$mac_arm"
    end
    on_intel do
      url "$url/releases/download/v$version/kvant-$version-x86_64-apple-darwin.tar.zst"
      sha256 "$mac_intel"
    end
  end

  on_linux do
    on_arm do
      url "$url/releases/download/v$version/kvant-$version-aarch64-unknown-linux-gnu.tar.zst"
      sha256 "$linux_arm"
    end
    on_intel do
      url "$url/releases/download/v$version/kvant-$version-x86_64-unknown-linux-gnu.tar.zst"
      sha256 "$linux_intel"
    end
  end

  def install
    bin.install "bin/kvant"
    man1.install Dir["share/man/man1/*"]
    bash_completion.install "share/bash-completion/completions/kvant"
    fish_completion.install "share/fish/vendor_completions.d/kvant.fish"
    zsh_completion.install "share/zsh/site-functions/_kvant"
  end

  service do
    run [opt_bin/"kvant", "serve"]
    keep_alive true
  end

  test do
    assert_match "Paris", shell_output("#{bin}/kvant run 'What is the capital of France?' --temp 0 --device cpu")
  end
end
