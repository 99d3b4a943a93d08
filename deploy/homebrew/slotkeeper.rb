# A template: the release workflow fills it (formula.py) and attaches it to the release, for a tap of your own.
class Slotkeeper < Formula
  include Language::Python::Virtualenv

  desc "Sidecar in front of llama-server: no prompt token is prefilled twice"
  homepage "{{homepage}}"
  url "{{url}}"
  sha256 "{{sha256}}"
  license "Apache-2.0"

  depends_on "rust" => :build # orjson, pydantic-core, tiktoken
  depends_on "python@3.13"

{{resources}}

  def install
    virtualenv_install_with_resources
    generate_completions_from_executable(bin/"slotkeeper", "completion", shells: [:bash, :zsh, :fish])
  end

  service do
    run [opt_bin/"slotkeeper", "serve"]
    keep_alive crashed: true
    log_path var/"log/slotkeeper.log"
    error_log_path var/"log/slotkeeper.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/slotkeeper --version")
  end
end
