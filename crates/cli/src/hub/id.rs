//! Ids of models of the hub.

use std::fmt;

/// A model of the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Id {
    /// `USER/NAME`
    pub repo: String,
    /// Required part of the file's name, such as `Q4_K_M`.
    pub quant: Option<String>,
    /// The file, when it is named.
    pub file: Option<String>,
}

impl Id {
    /// Parses `USER/NAME[:QUANT]`, with or without the hub's address.
    pub fn parse(text: &str) -> Option<Self> {
        const ADDRESSES: [&str; 4] =
            ["https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/"];
        let text = ADDRESSES.iter().find_map(|address| text.strip_prefix(address)).unwrap_or(text);
        let (repo, quant) = text.split_once(':').map_or((text, None), |(repo, quant)| (repo, Some(quant)));
        let is_name = |name: &str| {
            name.starts_with(|c: char| c.is_ascii_alphanumeric())
                && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let (user, name) = repo.split_once('/')?;
        let is_id = is_name(user) && is_name(name) && quant.is_none_or(is_name);
        is_id.then(|| Self { repo: repo.to_owned(), quant: quant.map(str::to_owned), file: None })
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        self.quant.iter().try_for_each(|quant| write!(f, ":{quant}"))?;
        self.file.iter().try_for_each(|file| write!(f, "/{file}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_have_a_user_a_name_and_optionally_a_type() {
        let id = Id::parse("bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0").unwrap();
        assert_eq!(id.repo, "bartowski/Llama-3.2-1B-Instruct-GGUF");
        assert_eq!(id.quant.as_deref(), Some("Q8_0"));
        assert_eq!(Id::parse("https://huggingface.co/a/b").unwrap().repo, "a/b");
        assert_eq!(Id::parse("hf.co/a/b:q4").unwrap().to_string(), "a/b:q4");
        for text in
            ["a", "a/b/c", "/a/b", "./a", "../a", "a/", "a/b c", "a/b:", "a/.b", "what is 1/2?", "~/a"]
        {
            assert_eq!(Id::parse(text), None, "{text}");
        }
    }
}
