//! What the description does not name is refused: parameters, bodies of calls that take none, and names in a path that are
//! no text.

use super::Body;
use crate::failure::Failure;
use axum::extract::{FromRequest as _, FromRequestParts as _, MatchedPath, RawPathParams, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use hyper::body::Body as _;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::openapi::path::{Operation, ParameterIn};

/// The described calls, by path and method.
pub(super) struct Described(BTreeMap<(String, Method), Takes>);

/// What a call takes beside the names in its path.
struct Takes {
    parameters: Vec<String>,
    body: bool,
}

/// The body of a call that takes none.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

impl Described {
    pub(super) fn new(description: &utoipa::openapi::OpenApi) -> Self {
        let calls = description.paths.paths.iter().flat_map(|(path, item)| {
            let methods = [
                (Method::GET, &item.get),
                (Method::POST, &item.post),
                (Method::PATCH, &item.patch),
                (Method::PUT, &item.put),
                (Method::DELETE, &item.delete),
            ];
            methods.into_iter().filter_map(|(method, call)| Some(((path.clone(), method), Takes::of(call.as_ref()?))))
        });
        Self(calls.collect())
    }

    /// Returns the request, if the description has room for all of it.
    async fn check(&self, request: Request) -> Result<Request, Failure> {
        let (mut parts, body) = request.into_parts();
        if let Err(error) = RawPathParams::from_request_parts(&mut parts, &()).await {
            return Err(Failure::bad_request(format!("a name in the path is not valid: {}", error.body_text())));
        }
        let path = parts.extensions.get::<MatchedPath>().map_or_else(String::new, |path| path.as_str().to_owned());
        let method = if parts.method == Method::HEAD { Method::GET } else { parts.method.clone() };
        // Other methods are refused further on.
        let Some(takes) = self.0.get(&(path, method)) else { return Ok(Request::from_parts(parts, body)) };
        let names = parts.uri.query().into_iter().flat_map(|query| query.split('&'));
        let names = names.map(|pair| pair.split('=').next().unwrap_or_default()).filter(|name| !name.is_empty());
        for name in names {
            if !takes.parameters.iter().any(|known| known == name) {
                return Err(Failure::bad_request(format!("this call has no parameter '{name}'")).in_field(name));
            }
        }
        if takes.body || body.is_end_stream() {
            return Ok(Request::from_parts(parts, body));
        }
        let Body(Nothing {}) = Body::from_request(Request::from_parts(parts.clone(), body), &()).await?;
        Ok(Request::from_parts(parts, axum::body::Body::empty()))
    }
}

impl Takes {
    fn of(call: &Operation) -> Self {
        let parameters = call.parameters.iter().flatten();
        let in_query = parameters.filter(|parameter| parameter.parameter_in == ParameterIn::Query);
        Self {
            parameters: in_query.map(|parameter| parameter.name.clone()).collect(),
            body: call.request_body.is_some(),
        }
    }
}

pub(super) async fn refuse_other(State(described): State<Arc<Described>>, request: Request, next: Next) -> Response {
    match described.check(request).await {
        Ok(request) => next.run(request).await,
        Err(failure) => failure.into_response(),
    }
}
